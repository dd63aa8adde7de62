"""A keeper with a bug planted in it, to see that a chaos run finds it.

    python -m tests.faults.chaos.planted BUG serve …

Each bug is a change of a few lines at a place where a real one might be made. Called by the harness's own tests only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.faults.chaos.world import PAIR
from weightcached.daemon import cli, custody, following, generations, server, vault, worker_process
from weightcached.daemon.claim import Claim
from weightcached.daemon.generation import Generation
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.kinds import MemoryKind


def path_absent() -> None:
    """A restarted keeper does not use the kept listener: it removes the socket file and binds anew."""

    def adopt(self: Claim, *_: object, **__: object) -> bool:
        self.place.socket_path.unlink(missing_ok=True)
        return False

    Claim.adopt = adopt  # type: ignore[method-assign]


def byte_flipped() -> None:
    """One bit of the segment is changed between the worker's last word and the seals."""
    seal = worker_process._seal

    def flip_and_seal(memory: OwnedFds, kind: MemoryKind) -> None:
        [byte] = os.pread(memory[0], 1, 0)
        os.pwrite(memory[0], bytes([byte ^ 1]), 0)
        seal(memory, kind)

    worker_process._seal = flip_and_seal


def published_half() -> None:
    """Sealed and published with half of the segment still as it was allocated."""
    seal = worker_process._seal

    def empty_half_and_seal(memory: OwnedFds, kind: MemoryKind) -> None:
        nbytes = os.fstat(memory[0]).st_size
        os.pwrite(memory[0], bytes(nbytes - nbytes // 2), nbytes // 2)
        seal(memory, kind)

    worker_process._seal = empty_half_and_seal


def descriptor_leaked() -> None:
    """One for each connection."""
    admit = server.Server._admit

    def leak_and_admit(self: server.Server, accepted: socket.socket) -> None:
        os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        admit(self, accepted)

    server.Server._admit = leak_and_admit  # type: ignore[method-assign]


def process_leaked() -> None:
    """A helper that is started with a generation that is adopted, and forgotten."""
    adopted = custody.Custody.adopted

    def leak_and_adopt(self: custody.Custody, generation: Generation, *, current: bool) -> None:
        subprocess.Popen(["sleep", "600"])
        adopted(self, generation, current=current)

    custody.Custody.adopted = leak_and_adopt  # type: ignore[method-assign]


def segment_not_kept() -> None:
    """The vault is given all but the last segment of a generation, and said to keep it."""
    keep = vault.NotifyVault.keep

    async def keep_less(self: vault.NotifyVault, items: Sequence[tuple[str, int]]) -> vault.Keeping:
        return await keep(self, [item for item in items if not item[0].endswith(".s0")])

    vault.NotifyVault.keep = keep_less  # type: ignore[method-assign]


def generation_not_freed() -> None:
    """Whatever is not needed any more is held all the same."""
    generations.Generations.to_free = lambda self, leased: []  # type: ignore[method-assign]


def record_not_read() -> None:
    """A rank that is no leader serves what it has prepared, whatever rank 0's record says."""
    look = following.Following.look

    async def decide_and_look(self: following.Following) -> None:
        if (prepared := self._changing.prepared) is not None:
            self._changing.commit(prepared.transaction, None)
        await look(self)

    following.Following.look = decide_and_look  # type: ignore[method-assign]


@dataclass(frozen=True)
class Bug:
    plant: Callable[[], None]
    invariant: str
    """That has to report it."""
    fault: str = "KillKeeper"
    """Which finds it, within three times."""
    group: str = "one"


BUGS = {
    "path_absent": Bug(path_absent, "path"),
    "byte_flipped": Bug(byte_flipped, "bytes"),
    "published_half": Bug(published_half, "bytes"),
    "descriptor_leaked": Bug(descriptor_leaked, "descriptors"),
    "process_leaked": Bug(process_leaked, "processes"),
    "segment_not_kept": Bug(segment_not_kept, "kept"),
    "generation_not_freed": Bug(generation_not_freed, "freed", "Update", PAIR),
    "record_not_read": Bug(record_not_read, "ranks", "SlowRank", PAIR),
}


def keeper(bug: str) -> tuple[str, ...]:
    """The supervised command of a keeper with that bug, up to its options."""
    return (sys.executable, "-m", "tests.faults.chaos.planted", bug, "serve")


if __name__ == "__main__":
    BUGS[sys.argv[1]].plant()
    sys.exit(cli.main(sys.argv[2:]))
