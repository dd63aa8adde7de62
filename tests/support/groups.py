"""All ranks of a model as real daemons, each under a supervisor, and what a coordinator says to them step by step.

    with group(model, runtime_dir, size=2) as ranks:
        change = Change(ranks, from_directory(other))
        change.open(); change.prepare(); change.prepared(); change.commit(); change.resolve()

The steps are those of ``client/control/course.py``, one by one, so that a test can kill anybody between any two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.commanding import Changer, new_transaction
from tests.support.daemons import Daemon, supervised_daemon
from tests.support.eventually import eventually
from tests.support.resources import open_fds
from weightcached.protocol.control import Decided, FromCheckpoint, FromHeld, RankState, Resolve


@contextmanager
def group(
    model: Path, runtime_dir: Path, *, size: int = 2, scripts: Mapping[int, Mapping[str, Any] | None] | None = None
) -> Iterator[list[Daemon]]:
    """Supervised daemons of all tensor-parallel ranks, ready, with scripted workers; ``None`` in ``scripts`` is the
    real one. Stopped at the end.
    """
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                supervised_daemon(
                    model,
                    runtime_dir,
                    script=(scripts or {}).get(rank, {}),
                    layout="fused",
                    tp_size=size,
                    tp_rank=rank,
                )
            )
            for rank in range(size)
        ]
        for one in ranks:
            one.wait_until("ready")
        yield ranks


def kill_and_wait(daemon: Daemon) -> None:
    """Kill the keeper, and wait until the next one is ready."""
    first = len(daemon.log.lines)
    daemon.kill_keeper()
    daemon.wait_ready_again(first)


class Change:
    """One coordinator's steps."""

    def __init__(self, ranks: list[Daemon], source: FromCheckpoint | FromHeld) -> None:
        leader = Changer(ranks[0])
        self.ranks = [leader, *(Changer(one, leader) for one in ranks[1:])]
        self.source = source
        self.transaction = new_transaction()
        self.bases = [one.current() for one in self.ranks]

    def open(self) -> None:
        assert self.ranks[0].open(self.transaction).open == self.transaction

    def prepare(self, *ranks: int) -> None:
        """Tell these ranks to prepare, or all."""
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].begin(self.transaction, self.source, base=self.bases[rank])

    def prepared(self, *ranks: int) -> None:
        """Wait until these ranks, or all, have prepared it."""
        for rank in ranks or range(len(self.ranks)):
            state = self.ranks[rank].ended(self.transaction)
            assert state.change is not None
            assert state.change.state == "prepared", state.change

    def commit(self) -> Decided:
        return self.ranks[0].decide(self.transaction, commit=True)

    def abort(self) -> Decided:
        return self.ranks[0].decide(self.transaction, commit=False)

    def resolve(self, *ranks: int) -> list[RankState]:
        """Have these ranks, or all, read the record."""
        chosen = ranks or range(len(self.ranks))
        return [self.ranks[rank].ask(Resolve(transaction=self.transaction), RankState) for rank in chosen]


def versions(ranks: list[Daemon]) -> list[str]:
    """What each rank serves now."""
    found = []
    for one in ranks:
        state = Changer(one).state()
        current = state.generation(state.current)
        assert current is not None
        found.append(current.receipts_version)
    return found


def waiting(ranks: list[Daemon]) -> list[str]:
    """What is open or waits for a decision, anywhere."""
    states = [Changer(one).state() for one in ranks]
    found = [one.open for one in states if one.open is not None]
    found += [one.change.transaction for one in states if one.change and one.change.state in ("preparing", "prepared")]
    return found


def left_behind(ranks: list[Daemon]) -> list[str]:
    """What there is besides the generations that the ranks say they hold: memory, in keepers and in their supervisors
    (which have to have all of it, too), workers, and what is open or waits.
    """
    found = [f"transaction {one}" for one in waiting(ranks)]
    for one in ranks:
        held = {state.generation for state in Changer(one).state().generations}
        memory = {"weightcached:state"} | {f"weightcached:{each}:{part}" for each in held for part in ("0", "manifest")}
        keeper = one.report().pid
        for who, pid in (("keeper", keeper), ("supervisor", one.pid)):
            names = [name[len("/memfd:") :].split()[0] for name in open_fds(pid).values() if "/memfd:" in name]
            at = f"{one.place.device}, {who}"
            found += [f"{at}: {name}" for name in set(names) - memory]
            found += [f"{at}: no {name}" for name in memory - set(names)]
            found += [f"{at}: {name} twice" for name, count in Counter(names).items() if count > 1]
        workers = [
            child for child in psutil.Process(keeper).children() if "weightcached.loader.worker" in _words(child)
        ]
        found += [f"{one.place.device}: {worker}" for worker in workers]
    return found


def eventually_nothing_left(ranks: list[Daemon], *, timeout_s: float = 20.0) -> None:
    """AssertionError with what :func:`left_behind` still finds."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = left_behind(ranks)
        return not found

    try:
        eventually(nothing, timeout_s=timeout_s)
    except AssertionError:
        raise AssertionError(f"left behind: {found}") from None


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
