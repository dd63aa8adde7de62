"""What a vault handed back, sorted: listeners, state, and the parts of generations. By what they are, not by names.

Owns recognising descriptors (systemd keeps no order, may rename, and may lack some) and naming what is put into a
vault. Looks at descriptors without reading what is in them; whether a generation can be adopted is ``adoption.py``'s
question. A memfd's own name says which part of which generation it is (``protocol/memory/names.py``); the name in the
vault is a hint where that fails, and all there is to go by for memory of a device.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightcached.daemon.listen_fds import HandedOver
from weightcached.daemon.state_record import MEMFD_NAME as STATE_MEMFD_NAME
from weightcached.protocol.memory import names

LISTENER_NAME = "listener"
STATE_NAME = "state"

_STORED = re.compile(r"g([0-9a-f]{32})\.(?:m|s(\d{1,4}))", re.ASCII)


def stored_names(generation: str, *, segments: int) -> list[str]:
    """The names of a generation's descriptors in a vault, in the order in which they are stored: the manifest, which
    says that all are there, last.
    """
    return [*(f"g{generation}.s{number}" for number in range(segments)), f"g{generation}.m"]


@dataclass
class Parts:
    """One generation's descriptors, as far as they came; they belong to the :class:`Holdings`."""

    manifest: int | None = None
    segments: dict[int, int] = field(default_factory=dict)
    surplus: list[int] = field(default_factory=list)
    """What came twice under different faces."""
    names: set[str] = field(default_factory=set)
    """Theirs in the vault."""
    recorded_nbytes: int = 0
    """What the state says that its segments take: descriptors of a device's memory do not tell."""
    problem: str | None = None
    """Why it cannot be adopted, where that shows already."""

    @property
    def fds(self) -> Iterator[int]:
        yield from self.segments.values()
        yield from self.surplus
        if self.manifest is not None:
            yield self.manifest

    @property
    def nbytes(self) -> int:
        """Bytes that these descriptors hold, as far as is known."""
        return max(self.recorded_nbytes, sum(os.fstat(fd).st_size for fd in self.fds))


@dataclass
class Holdings:
    """Everything that came. Closes on :meth:`close` what was not taken. Names are those in the vault."""

    listeners: list[tuple[str, int]] = field(default_factory=list)
    states: list[tuple[str, int]] = field(default_factory=list)
    generations: dict[str, Parts] = field(default_factory=dict)
    strangers: list[tuple[str, int]] = field(default_factory=list)
    _owned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, handed: HandedOver) -> Holdings:
        """Sort; takes ``handed.fds`` over. Raises nothing, whatever was handed over."""
        holdings = cls(_owned=set(fds := handed.fds.take_all()))
        nameless = [(name, fd) for name, fd in zip(handed.names, fds, strict=True) if not holdings._sort(name, fd)]
        for name, fd in nameless:  # last: what is known only by a hint takes nobody's place
            holdings._sort_by_hint(name, fd)
        return holdings

    def _sort(self, name: str, fd: int) -> bool:
        """Whether it could be told what it is."""
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        memfd_name = names.name_of(fd) if kind == stat.S_IFREG else None
        if kind == stat.S_IFSOCK and _listens(fd):
            self.listeners.append((name, fd))
        elif memfd_name is None:
            return False
        elif memfd_name == STATE_MEMFD_NAME:
            self.states.append((name, fd))
        elif (part := names.part_of(memfd_name) or _hint(name)) is None:
            self.strangers.append((name, fd))
        else:
            generation, number = part
            self._add(self.generations.setdefault(generation, Parts()), name, number, fd)
        return True

    def _sort_by_hint(self, name: str, fd: int) -> None:
        """Perhaps a device's memory, which has no name of its own: a segment that has not come otherwise."""
        part = _hint(name)
        parts = self.generations.get(part[0]) if part is not None else None
        if part is None or part[1] is None or parts is None or parts.manifest is None or part[1] in parts.segments:
            self.strangers.append((name, fd))
        else:
            self._add(parts, name, part[1], fd)

    def _add(self, parts: Parts, name: str, number: int | None, fd: int) -> None:
        parts.names.add(name)
        if number is None and parts.manifest is None:
            parts.manifest = fd
        elif number is not None and number not in parts.segments:
            parts.segments[number] = fd
        else:
            parts.surplus.append(fd)
            parts.problem = "two manifests came" if number is None else f"segment {number} came twice"

    def take(self, fd: int) -> int:
        """``fd``, the caller's from now on."""
        self._owned.remove(fd)
        return fd

    def close(self) -> None:
        """Close what was not taken. Safe to call twice."""
        owned, self._owned = self._owned, set()
        for fd in owned:
            os.close(fd)


def _hint(name: str) -> tuple[str, int | None] | None:
    found = _STORED.fullmatch(name)
    return None if found is None else (found[1], None if found[2] is None else int(found[2]))


def _listens(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as one:
        if (one.family, one.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            return False
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
