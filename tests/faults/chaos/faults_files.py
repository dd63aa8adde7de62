"""Faults of files: a checkpoint that vanishes, is stamped anew or replaced, and a digest cache on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.faults.chaos.broken import Broken
from tests.faults.chaos.faults import Fault, kill_keeper
from tests.faults.chaos.faults_loading import UNREADABLE
from tests.faults.chaos.group import checkpoint_of
from tests.faults.chaos.site import Site
from tests.faults.chaos.world import World
from weightcached.protocol.errors import CheckpointChanged, CheckpointMismatch, CheckpointUnproven

_PIECE = bytes(4096)


class CheckpointVanishes(Fault):
    """And, often, the keeper dies meanwhile: what is resident is served all the same."""

    at = "single"
    weight = 4
    permits = UNREADABLE

    def strike(self, world: World, site: Site) -> None:
        checkpoint_of(site).vanish()
        try:
            looping = site.group.one("loop")
            mark = looping.records.mark()
            if world.random.random() < 0.7:
                kill_keeper(world, site)
            looping.wait_attached(mark)
        finally:
            checkpoint_of(site).come_back()


class CheckpointStampedAnew(Fault):
    """touch or chmod: receipts prove nothing any more, digests do."""

    at = "single"
    weight = 6
    permits = frozenset({CheckpointChanged.code})  # an engine that was reading it

    def strike(self, world: World, site: Site) -> None:
        checkpoint_of(site).restamp(world.random)
        if world.random.random() < 0.5:
            kill_keeper(world, site)


class CheckpointReplaced(Fault):
    """Other weights of the same shapes: no engine that asks for these is given the resident ones."""

    at = "single"
    weight = 3
    permits = UNREADABLE | {CheckpointMismatch.code, CheckpointUnproven.code}

    def strike(self, world: World, site: Site) -> None:
        looping = site.group.one("loop")
        looping.check(rows="some")
        checkpoint_of(site).swap()
        try:
            mark = looping.records.mark()
            looping.go()
            attached = looping.wait_attached(mark)
            if attached["outcome"] not in (CheckpointMismatch.code, CheckpointUnproven.code):
                raise Broken("content", f"an engine with other weights on disk was answered {attached}")
            if world.random.random() < 0.4:
                kill_keeper(world, site)
            looping.check(rows="some")
        finally:
            checkpoint_of(site).swap()
        looping.go()


class DigestCacheFull(Fault):
    """Digests cannot be remembered; they are computed, and everything goes on."""

    at = "single"
    weight = 4
    permits = frozenset({CheckpointChanged.code})
    needs_small_disk = True

    def strike(self, world: World, site: Site) -> None:
        filler = Path(site.folders.digests / "filler")
        try:
            _fill(filler)
            checkpoint_of(site).restamp(world.random)
            if world.random.random() < 0.6:
                kill_keeper(world, site)
            looping = site.group.one("loop")
            looping.wait_attached(looping.records.mark())
        finally:
            filler.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(_PIECE)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


FILE_FAULTS: tuple[type[Fault], ...] = (CheckpointVanishes, CheckpointStampedAnew, CheckpointReplaced, DigestCacheFull)
