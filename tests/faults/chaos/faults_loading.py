"""Faults that strike while weights are being loaded: the place is taken down first, so that it has to load."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress

from tests.faults.chaos.broken import Broken
from tests.faults.chaos.faults import STOPPED, Fault, require_clean_exit
from tests.faults.chaos.group import checkpoint_of
from tests.faults.chaos.site import Site
from tests.faults.chaos.world import World
from weightcached.protocol.errors import CheckpointError, DaemonFailed, InvalidOption, WeightCacheError

_WORKER_MEMORY_BYTES = 48 << 20


def codes(*families: type[WeightCacheError]) -> frozenset[str]:
    """The codes of these errors and all below them."""
    found = {family.code for family in families}
    for family in families:
        found |= codes(*family.__subclasses__()) if family.__subclasses__() else set()
    return frozenset(found)


UNREADABLE = codes(CheckpointError, InvalidOption)
"""What an engine meets that cannot read its own checkpoint."""


def start_again(world: World, site: Site) -> None:
    """Nothing is kept, and it loads."""
    if world.random.random() < 0.5:
        site.supervisor.send_signal(signal.SIGTERM)
        require_clean_exit(site)
    else:
        site.kill_supervisor()
    site.start()


class KillWorker(Fault):
    """The keeper reports it and tries again; whoever waits goes on waiting."""

    at = "single"
    weight = 2
    permits = STOPPED
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        start_again(world, site)
        worker = site.worker_pid()
        time.sleep(world.random.uniform(0, 0.2))
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(worker, signal.SIGKILL)
        site.wait_ready(0)


class WorkerOutOfMemory(Fault):
    """Its address space is limited from its first moment."""

    at = "single"
    weight = 1
    permits = STOPPED
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        start_again(world, site)
        with suppress(ProcessLookupError):
            resource.prlimit(site.worker_pid(), resource.RLIMIT_AS, (_WORKER_MEMORY_BYTES, _WORKER_MEMORY_BYTES))
        site.wait_ready(0)


class KillKeeperWhileLoading(Fault):
    """Its worker goes with it, nothing half-filled is kept, and the next keeper loads."""

    at = "single"
    weight = 2
    permits = STOPPED
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        start_again(world, site)
        worker = site.worker_pid()
        time.sleep(world.random.uniform(0, 0.4))
        mark = site.records.mark()
        os.kill(site.keeper_pid(), signal.SIGKILL)
        site.wait_gone(worker)
        site.wait_ready(mark)


class LoadFails(Fault):
    """The checkpoint is not there at the start: ``failed``, said to whoever asks; a restart loads."""

    at = "single"
    weight = 1
    permits = STOPPED | UNREADABLE | {DaemonFailed.code}
    keeps_weights = False

    def strike(self, world: World, site: Site) -> None:
        checkpoint_of(site).vanish()
        try:
            start_again(world, site)
            site.wait_state("failed", 0)
            report = site.report()
            if report.last_error is None or report.generation is not None:
                raise Broken("failed", f"{site.name} failed to load and reports {report}")
        finally:
            checkpoint_of(site).come_back()
        site.supervisor.send_signal(signal.SIGTERM)
        require_clean_exit(site)
        site.start()
        site.wait_ready(0)


LOADING_FAULTS: tuple[type[Fault], ...] = (KillWorker, WorkerOutOfMemory, KillKeeperWhileLoading, LoadFails)
