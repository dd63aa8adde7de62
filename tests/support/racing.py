"""Coordinators at once on one group, and what has to be true however that has ended.

Each is a thread that begins after its delay. What they report is compared with the leader's own record, with what every
rank serves, and with what there is in memory; see :func:`race`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.commanding import Changer
from tests.support.daemons import Daemon
from tests.support.eventually import eventually
from tests.support.groups import eventually_nothing_left, versions
from weightcached.protocol.control import Decided, ReadDecision
from weightcached.protocol.errors import GenerationGone, UpdateConflict, WeightCacheError

KEPT = 2
"""Generations that are left: what is served, and one for rollback."""

Outcome = str | WeightCacheError


def race(
    ranks: list[Daemon],
    coordinators: Sequence[Callable[[], str]],
    delays_s: Sequence[float],
    *,
    may_end_others: bool = False,
) -> list[Outcome]:
    """What each has reported: the version that it had served, which it returned, or the error that it raised.

    AssertionError unless what was committed is just what was reported as served, all ranks serve what was committed
    last, whoever lost was told to whom, and nothing is left. ``may_end_others``: one of them has ``force``.
    """
    before, first = versions(ranks), len(ranks[0].log.lines)
    outcomes = _run(coordinators, delays_s)
    committed = _committed(ranks[0], first)
    told = f"reported: {outcomes}; committed: {committed}"

    made = [one for one in outcomes if isinstance(one, str)]
    assert len(made) == len(committed), told
    for decided in committed:
        assert decided.version in made or decided.receipts_version in made, told
    eventually_nothing_left(ranks)
    served = committed[-1].receipts_version if committed else before[0]
    assert versions(ranks) == [served] * len(ranks), told

    states = [Changer(one).state() for one in ranks]
    held = [
        known
        for state in states
        for one in state.generations
        for known in (one.generation, one.version, one.receipts_version)  # the digest may be known by now
    ]
    for lost in outcomes:
        if isinstance(lost, WeightCacheError):
            assert isinstance(lost, UpdateConflict | GenerationGone), told
            named = any(one in str(lost) for one in [*(each.transaction for each in committed), *held])
            assert named or (may_end_others and "another coordinator" in str(lost)), told
    eventually(lambda: all(len(Changer(one).state().generations) <= KEPT for one in ranks))
    return outcomes


def _run(coordinators: Sequence[Callable[[], str]], delays_s: Sequence[float]) -> list[Outcome]:
    begin_s = time.monotonic() + 0.01

    def one(coordinator: Callable[[], str], delay_s: float) -> Outcome:
        time.sleep(max(0.0, begin_s + delay_s - time.monotonic()))  # the race itself
        try:
            return coordinator()
        except WeightCacheError as error:
            return error

    with ThreadPoolExecutor(len(coordinators)) as threads:
        return list(threads.map(one, coordinators, delays_s))


def _committed(leader: Daemon, first: int) -> list[Decided]:
    """What the leader has decided to commit since then, in that order."""
    records = leader.log.records(first)
    return [
        Changer(leader).ask(ReadDecision(transaction=record["transaction"]), Decided)
        for record in records
        if (record["message"], record.get("outcome")) == ("change decided", "committed")
    ]
