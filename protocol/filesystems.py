"""Owns one judgement: can inode and ctime of *this* file be believed to move whenever its bytes do?

On ext4, xfs, btrfs, tmpfs and NFS (whose open revalidates) they can. overlayfs shows the times of a file in one of its
layers, so the file system of that layer decides, and a layer that cannot be seen from here (as in most containers)
decides against. Everything else (squashfs, erofs, FUSE, unknown) is not believed unless an operator says so.

Called by :mod:`weightcached.protocol.receipts`, and by options that name file systems. It changes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from weightcached.protocol.errors import InvalidOption

TRUSTED = frozenset({"ext4", "xfs", "btrfs", "tmpfs", "nfs"})

_NAMES = {  # f_type of statfs(2), from linux/magic.h and the file systems' own sources
    0xEF53: "ext4",  # ext2 and ext3 too: the same driver serves them
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x6969: "nfs",
    0x794C7630: "overlay",
    0x65735546: "fuse",  # and virtiofs
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0xFF534D42: "cifs",
    0xFE534D42: "smb",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x858458F6: "ramfs",
    0x9660: "iso9660",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x5346544E: "ntfs",
}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Judgement:
    """What was decided about one file, and by which rule (a sentence for the log)."""

    trusted: bool
    rule: str
    by_operator: bool = False


def file_system_of(fd: int) -> str:
    """The name of the descriptor's file system; one we have no name for is ``0x`` and its number in hex."""
    # struct statfs begins with f_type, a long (an unsigned int on s390x), and is at most 120 bytes.
    buffer = (ctypes.c_long * 32)()
    while _libc.fstatfs(fd, ctypes.byref(buffer)) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    magic = buffer[0] & 0xFFFFFFFF
    return _NAMES.get(magic, f"{magic:#x}")


def checked_name(name: str) -> str:
    """``name``, if it can name a file system in ``also_trusted``; else :class:`InvalidOption` with those that can."""
    if name in _NAMES.values() or re.fullmatch(r"0x[1-9a-f][0-9a-f]{0,7}", name):
        return name
    raise InvalidOption(
        "unknown file system",
        expected=f"one of {', '.join(sorted(_NAMES.values()))}, or statfs's f_type as 0x…",
        found=name,
    )


def judge(fd: int, *, also_trusted: Collection[str] = ()) -> Judgement:
    """Whether ``fd`` (a regular file's) lies where inode and ctime can be trusted.

    ``also_trusted`` is the operator's list, in the words of :func:`file_system_of`.
    """
    name = file_system_of(fd)
    if name in also_trusted:
        return Judgement(True, f"{name} is trusted by the operator", by_operator=True)
    if name in TRUSTED:
        return Judgement(True, f"{name} is trusted")
    if name != "overlay":
        return Judgement(False, f"{name} is not a file system whose inode and ctime are trusted")
    with _in_its_layer(fd) as backing:
        if backing is None:
            return Judgement(False, "overlay whose layers cannot be seen from here")
        below = judge(backing, also_trusted=also_trusted)
    return replace(below, rule=f"overlay over a layer where {below.rule}")


@contextmanager
def _in_its_layer(fd: int) -> Iterator[int | None]:
    """The same file in the overlay's layer that holds it, as an ``O_PATH`` descriptor; ``None`` where that is unseen.

    A layer's path means something only in the mount namespace that made the overlay. So a path is believed only if the
    file there shows the same size and times: overlayfs reports those of the file below. It may also lead back to this
    very file, where the overlay is mounted over its own layer (the root of a system that keeps no change).
    """
    shown = os.fstat(fd)
    for path in _layer_paths(fd):
        try:
            backing = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(backing)
            if _stamp(found) == _stamp(shown) and not os.path.samestat(found, shown):
                yield backing
                return
        finally:
            os.close(backing)
    yield None


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _layer_paths(fd: int) -> list[str]:
    """Where the file would be in each layer, uppermost first."""
    mount = _mount_of(fd)
    if mount is None:
        return []
    root, point, options = mount
    try:
        inside = PurePosixPath(os.readlink(f"/proc/self/fd/{fd}")).relative_to(point)
    except ValueError:
        return []
    relative = (PurePosixPath(root) / inside).relative_to("/")
    return [str(PurePosixPath(layer) / relative) for layer in _layers(options) if layer.startswith("/")]


def _mount_of(fd: int) -> tuple[str, str, list[str]] | None:
    """(root, mount point, super options) of the descriptor's mount, when our namespace lists it."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        number = next(line.split()[1] for line in file if line.startswith("mnt_id:"))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            if fields[0] == number:
                options = fields[fields.index("-") + 3].split(",")
                return _unescape(fields[3]), _unescape(fields[4]), [_unescape(option) for option in options]
    return None


def _layers(options: list[str]) -> list[str]:
    """The layers that overlayfs's mount options name: ``lowerdir=a:b`` (colons escaped), or one ``lowerdir+=`` each."""
    upper, lower = [], []
    for option in options:
        key, _, value = option.partition("=")
        if key == "upperdir":
            upper.append(value)
        elif key in ("lowerdir+", "datadir+"):
            lower.append(value)
        elif key == "lowerdir":
            parts = re.findall(r"(?:\\.|[^:\\])+", value)
            lower.extend(re.sub(r"\\(.)", r"\1", part) for part in parts)
    return upper + lower


def _unescape(field: str) -> str:
    """mountinfo writes blanks, backslashes and commas as ``\\ooo``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
