"""The claim on a place: its directory, its lock, its socket file. Whoever holds the claim is the place's daemon.

Owns creating and checking the directory, the lock (held for life, its file never removed), binding aside and renaming
over the final path, going on with a listener that a vault kept, and removing exactly the socket file that is ours.
Knows nothing of what is served. Used by the keeper, once, from one thread; nothing here waits.

The lock decides. Its file's text names the holder for messages only: nobody acts on a pid read from a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from weightcached.protocol.errors import InvalidPlace, PlaceTaken, UntrustedDaemon, WeightCacheError
from weightcached.protocol.peers import AllowList, check_directory, check_way, peer_of
from weightcached.protocol.places import BINDING_SUFFIX, Place

BACKLOG = 1024
_DIRECTORY_MODE = 0o755
_LOCK_MODE = 0o600  # whoever can open the lock file could hold the lock
_HOLDER_MAX_BYTES = 512
_LOCK_ATTEMPTS = 100


class Claim:
    """A held lock, and the socket file where one was bound. Made by :func:`take`; ends with :meth:`release` or the
    process.
    """

    def __init__(self, place: Place, lock_fd: int) -> None:
        self.place = place
        self._lock_fd = lock_fd
        self._bound: os.stat_result | None = None
        self._beside: dict[Path, os.stat_result] = {}

    def listen(self, *, mode: int) -> socket.socket:
        """Bind, listen, then rename over the place's socket path: the path is never absent and never not listening.

        The caller owns the socket. Raises PlaceTaken when a process without our lock listens at the path (somebody
        removed the lock file under it), InvalidPlace when something else than a socket is there.
        """
        listener, self._bound = self._listen(self.place.socket_path, self.place.binding_path, mode)
        return listener

    def listen_beside(self, path: Path, *, mode: int) -> socket.socket:
        """As :meth:`listen`, at another path of this place's. Its file says nothing about weights: it is removed when
        the claim ends, whatever becomes of the socket file.
        """
        listener, self._beside[path] = self._listen(path, path.with_name(path.name + BINDING_SUFFIX), mode)
        return listener

    def _listen(self, path: Path, binding_path: Path, mode: int) -> tuple[socket.socket, os.stat_result]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._require_replaceable(path)
            _remove_socket(binding_path)  # left by a daemon that was killed between bind and rename
            listener.bind(str(binding_path))
            os.chmod(binding_path, mode)
            listener.listen(BACKLOG)
            bound = os.lstat(binding_path)
            os.rename(binding_path, path)
        except WeightCacheError:
            listener.close()
            raise
        except OSError as error:
            listener.close()
            raise InvalidPlace("cannot put a socket there", found=error.strerror, where=path) from error
        return listener, bound

    def adopt(self, listener: socket.socket, *, device: int, inode: int, mode: int) -> bool:
        """Go on with a listening socket that another run of this daemon bound, if it is the one behind the place's
        path: the socket file there is the one with these numbers. Nothing is done where it is not.
        """
        path = self.place.socket_path
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return False
        if not stat.S_ISSOCK(found.st_mode) or (found.st_dev, found.st_ino) != (device, inode):
            return False
        if listener.getsockname() not in (str(self.place.binding_path), str(path)):
            return False  # it may be behind any other path
        listener.setblocking(False)
        listener.listen(BACKLOG)  # again: from now on peers see this process, and not the dead one that bound it
        if stat.S_IMODE(found.st_mode) != mode:
            os.chmod(path, mode)
        self._bound = found
        return True

    @property
    def bound(self) -> tuple[int, int]:
        """Device and inode of the socket file that is ours. ValueError before there is one."""
        if self._bound is None:
            raise ValueError("nothing is bound")
        return self._bound.st_dev, self._bound.st_ino

    def remove_orphan(self) -> bool:
        """Remove the place's socket file that nobody listens behind; whether there was one. Raises what
        :meth:`listen` raises about who is there.
        """
        place = self.place
        self._require_replaceable(place.socket_path)
        for beside in (place.control_path, place.events_path):
            _remove_socket(beside)
        try:
            os.unlink(place.socket_path)
        except FileNotFoundError:
            return False
        return True

    def leave(self) -> None:
        """The socket file stays when this claim ends: weights are still cached here, and clients must hear of it."""
        self._bound = None

    def _require_replaceable(self, path: Path) -> None:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise InvalidPlace(
                "something that is not a socket is where the socket has to be",
                expected="nothing, or a socket left by an earlier daemon",
                found=stat.filemode(found.st_mode),
                where=path,
                next_step="look at what it is, and move it away",
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            failure = probe.connect_ex(str(path))
            if failure in (errno.ECONNREFUSED, errno.ENOENT):
                return
            holder = str(peer_of(probe)) if failure == 0 else os.strerror(failure)
        raise PlaceTaken(
            "a process that does not hold the place's lock listens at its path",
            expected="nobody",
            found=holder,
            where=path,
            next_step="somebody removed the lock file of a running daemon: stop that daemon, then start this one",
        )

    def unlink(self) -> bool:
        """Remove the socket file if it is the one bound here; whether it was. A successor's file is left alone."""
        bound, self._bound = self._bound, None
        return bound is not None and _unlink_same(self.place.socket_path, bound)

    def unlink_beside(self) -> None:
        """Remove the files that :meth:`listen_beside` made, as far as they are still ours. Safe to call twice."""
        while self._beside:
            _unlink_same(*self._beside.popitem())

    def release(self) -> None:
        """Give the lock back; its file stays. Safe to call twice."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            self.unlink_beside()
            os.ftruncate(fd, 0)  # or whoever loses the next race might read our name for the winner's
            os.close(fd)


def take(place: Place, allowed: AllowList) -> Claim:
    """Make and check the place's directory, then lock it. Nobody else's files are touched when this raises.

    Raises PlaceTaken naming the holder, UntrustedDaemon for a directory or a lock file that others could write to or
    exchange, InvalidPlace when the file system says no.
    """
    with contextlib.suppress(FileNotFoundError):
        check_way(place.runtime_dir, allowed)  # before anything is made on it
    for directory in (place.runtime_dir, place.directory):
        _make_directory(directory)
        check_directory(directory, allowed)
    fd = _lock(place, allowed)
    try:
        _write_holder(fd, place)
    except OSError as error:
        os.close(fd)
        raise InvalidPlace(
            "cannot write to the lock file",
            found=error.strerror,
            where=place.lock_path,
            next_step="see that the file system has room and can be written to",
        ) from error
    return Claim(place, fd)


def _make_directory(directory: Path) -> None:
    for missing in reversed([path for path in (directory, *directory.parents) if not os.path.exists(path)]):
        try:
            os.mkdir(missing, _DIRECTORY_MODE)
            # A umask may have taken more away than others need to reach the socket. Of what was made, not of a name.
            fd = os.open(missing, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(fd, _DIRECTORY_MODE)
            finally:
                os.close(fd)
        except FileExistsError:
            continue
        except OSError as error:
            raise InvalidPlace(
                "cannot make the runtime directory",
                found=error.strerror,
                where=missing,
                next_step="make it for this user (under systemd: systemd-tmpfiles --create weightcached.conf), "
                "or choose another --runtime-dir",
            ) from error


def _lock(place: Place, allowed: AllowList) -> int:
    """The locked descriptor of what is at the lock's path. Raises PlaceTaken, UntrustedDaemon or InvalidPlace."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fd = os.open(place.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _LOCK_MODE)
        except OSError as error:
            raise InvalidPlace("cannot open the lock file", found=error.strerror, where=place.lock_path) from error
        try:
            _require_private(fd, place.lock_path, allowed)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(place.lock_path)):
                    return fd
        except BlockingIOError as error:
            holder = _read_holder(fd)
            os.close(fd)
            raise PlaceTaken(
                "another daemon serves this place",
                found=holder,
                where=place.lock_path,
                next_step="stop that daemon first, or choose another --name",
            ) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was replaced before we had it locked: what is at the path now decides
    raise InvalidPlace("somebody keeps replacing the lock file", where=place.lock_path)


def _require_private(fd: int, path: Path, allowed: AllowList) -> None:
    """Only a file that nobody else can open, under no other name: what is written into it is written nowhere else."""
    found = os.fstat(fd)
    others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and allowed.admits_uid(found.st_uid) and not others:
        return
    raise UntrustedDaemon(
        "the lock file is not one that a daemon made",
        expected="a regular file of mode 0600 with one name, of a user we trust",
        found=f"{stat.filemode(found.st_mode)}, {found.st_nlink} names, uid {found.st_uid}",
        where=path,
        next_step="see that no daemon serves this place, and remove it",
    )


def _write_holder(fd: int, place: Place) -> None:
    text = f"pid {os.getpid()}, place {place}\n".encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _read_holder(fd: int) -> str:
    text = os.pread(fd, _HOLDER_MAX_BYTES, 0).decode("utf-8", "replace").strip()
    return ascii(text)[1:-1] if text else "a daemon that has only just taken it"


def _unlink_same(path: Path, bound: os.stat_result) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not os.path.samestat(found, bound):
        return False
    os.unlink(path)
    return True


def _remove_socket(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidPlace(
            "something that is not a socket is where the socket is bound first",
            found=stat.filemode(found.st_mode),
            where=path,
            next_step="look at what it is, and move it away",
        )
    os.unlink(path)
