"""Where one daemon serves: a place is (runtime directory, name, device), and everything's path follows from it.

Owns the default runtime directory, the socket and lock paths, their limits, and finding the places of a directory.
Both sides use it; neither takes paths from anywhere else. Touches the file system only in :func:`places_in`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.errors import InvalidOption, InvalidPlace
from weightcached.protocol.text import shown

DEFAULT_RUNTIME_DIR = Path("/run/weightcached")
RUNTIME_DIR_VARIABLE = "WEIGHTCACHED_RUNTIME_DIR"
DEFAULT_NAME = "default"
SOCKET_SUFFIX = ".sock"
LOCK_SUFFIX = ".lock"
CONTROL_SUFFIX = ".ctl"
EVENTS_SUFFIX = ".evt"
# sun_path holds 108 bytes with its terminating NUL. The daemon binds under a temporary name first (the final name and
# this suffix), so the suffix has to fit too.
SOCKET_PATH_MAX_BYTES = 107
BINDING_SUFFIX = ".new"

RANKS_MAX = 1024
"""More ranks than any model has. Beyond it is a slip, found out before a rank is started or waited for."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_WORD = "letters, digits, '_', '-', '.', not starting with '.' or '-'"


def place_name(text: str) -> str:
    """The word as a place's name. Raises InvalidOption for one that no place could have."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise InvalidOption("unusable name", expected=_WORD, found=shown(text))
    return text


def runtime_directory(option: str | os.PathLike[str] | None = None) -> Path:
    """The runtime directory: the explicit option, else ``WEIGHTCACHED_RUNTIME_DIR``, else ``/run/weightcached``.

    No other variable matters: a default that depended on the environment would differ between a container and its host,
    and an engine that looks elsewhere would silently load from disk.
    """
    given = os.environ.get(RUNTIME_DIR_VARIABLE) or DEFAULT_RUNTIME_DIR if option is None else option
    if not isinstance(given, str | os.PathLike):
        raise InvalidOption("the runtime directory must be a path", expected="an absolute path", found=shown(given))
    chosen = Path(given)
    if not chosen.is_absolute() or "\0" in str(chosen):
        raise InvalidOption("the runtime directory must be an absolute path", found=ascii(str(chosen)))
    return chosen


def host_device(
    *, tp_size: int, tp_rank: int, pp_size: int = 1, pp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0
) -> str:
    """The device word of a host-memory place: ``host-tp0of2``, and with pipeline stages or expert parallelism their
    ranks too: ``host-tp0of2-pp1of3-ep0of4``.
    """
    device = "host"
    for kind, rank, size in (("tp", tp_rank, tp_size), ("pp", pp_rank, pp_size), ("ep", ep_rank, ep_size)):
        if not 1 <= size <= RANKS_MAX:
            raise InvalidOption(f"unusable {kind} size", expected=f"1 to {RANKS_MAX}", found=size)
        if not 0 <= rank < size:
            raise InvalidOption(f"the {kind} rank is out of range", expected=f"0 to {size - 1}", found=rank)
        if kind == "tp" or size > 1:
            device += f"-{kind}{rank}of{size}"
    return device


@dataclass(frozen=True, slots=True)
class Place:
    """Where one daemon serves. Made only with valid words and a socket path that fits (InvalidPlace otherwise)."""

    runtime_dir: Path
    name: str
    device: str

    def __post_init__(self) -> None:
        place_name(self.name)
        if not isinstance(self.device, str) or not _NAME.fullmatch(self.device):
            raise InvalidOption("unusable device", expected=_WORD, found=shown(self.device))
        longest = os.fsencode(self.socket_path) + BINDING_SUFFIX.encode()
        if len(longest) > SOCKET_PATH_MAX_BYTES:
            raise InvalidPlace(
                "the socket's path is too long",
                expected=f"at most {SOCKET_PATH_MAX_BYTES - len(BINDING_SUFFIX)} bytes",
                found=f"{len(os.fsencode(self.socket_path))} bytes",
                where=self.socket_path,
                next_step="choose a shorter --runtime-dir or --name",
            )

    @property
    def directory(self) -> Path:
        return self.runtime_dir / self.name

    @property
    def socket_path(self) -> Path:
        return self.directory / f"{self.device}{SOCKET_SUFFIX}"

    @property
    def lock_path(self) -> Path:
        return self.directory / f"{self.device}{LOCK_SUFFIX}"

    @property
    def control_path(self) -> Path:
        """Where the daemon takes commands (ZeroMQ, ROUTER). No longer than :attr:`binding_path`."""
        return self.directory / f"{self.device}{CONTROL_SUFFIX}"

    @property
    def events_path(self) -> Path:
        """Where the daemon tells events (ZeroMQ, XPUB)."""
        return self.directory / f"{self.device}{EVENTS_SUFFIX}"

    @property
    def binding_path(self) -> Path:
        """Where the daemon binds and listens before it renames over :attr:`socket_path`."""
        return self.directory / f"{self.device}{SOCKET_SUFFIX}{BINDING_SUFFIX}"

    def __str__(self) -> str:
        return f"{self.name}/{self.device}"


def places_in(runtime_dir: Path) -> list[Place]:
    """Every place of ``runtime_dir`` that has a socket file or a lock file, sorted. A missing directory has none.

    Entries whose names no place could have are somebody else's and are passed over. Raises InvalidPlace for a directory
    that cannot be listed, or is none: what it holds is unknown, which is not the same as nothing.
    """
    found = set()
    for name in _entries(runtime_dir):
        for entry in _entries(runtime_dir / name, none=(FileNotFoundError, NotADirectoryError)):
            device, suffix = os.path.splitext(entry)
            if suffix in (SOCKET_SUFFIX, LOCK_SUFFIX):
                with suppress(InvalidOption, InvalidPlace):
                    found.add(Place(runtime_dir, name, device))
    return sorted(found, key=lambda place: (place.name, place.device))


def _entries(directory: Path, *, none: tuple[type[OSError], ...] = (FileNotFoundError,)) -> list[str]:
    try:
        return os.listdir(directory)
    except none:
        return []
    except OSError as error:
        raise InvalidPlace("a directory of places cannot be listed", found=error.strerror, where=directory) from error


def sockets_near(place: Place) -> list[Path]:
    """Socket files that exist in ``place``'s runtime directory, to help whoever looked at the wrong path. Names that no
    place could have, such as those that play tricks on a terminal, are left out.
    """
    found = place.runtime_dir.glob(f"*/*{SOCKET_SUFFIX}")
    return sorted(path for path in found if _NAME.fullmatch(path.name) and _NAME.fullmatch(path.parent.name))
