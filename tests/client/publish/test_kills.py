"""Whoever is killed in the middle of a push: both ranks serve what they served, and the next push goes through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.client.publish.dying_trainer import STEPS
from tests.client.publish.test_publish import BUCKETS, trained, where
from tests.support.commanding import Changer
from tests.support.daemons import TIMEOUT_S, Daemon
from tests.support.groups import eventually_nothing_left, group, kill_and_wait, left_behind, versions, waiting
from tests.support.referenced import raw
from tests.support.unprivileged import ROOT
from weightcached.client import attach
from weightcached.client.control.group import Group, Where
from weightcached.client.publish import publish, stage
from weightcached.client.publish.session import Publication
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable, WeightCacheError, WorkerDied


def start_trainer(ranks: list[Daemon], step: str, *timeout_s: str) -> subprocess.Popen[str]:
    """`dying_trainer.py`, which ends at that step. The caller waits for it."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.client.publish.dying_trainer"),
            *(str(ranks[0].place.runtime_dir), step, *timeout_s),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def engines(ranks: list[Daemon]) -> Iterator[None]:
    """An engine at each rank. In the end they have what they had, and the leases of it."""
    with ExitStack() as stack:
        attached = [
            stack.enter_context(
                attach(
                    one.model_dir,
                    runtime_dir=one.place.runtime_dir,
                    layout="fused",
                    tp_size=len(ranks),
                    tp_rank=rank,
                    want="current",
                    mode="require",
                )
            )
            for rank, one in enumerate(ranks)
        ]
        had = [(weights.generation, weights.version, raw(weights["model.norm.weight"])) for weights in attached]
        yield
        for rank, weights in enumerate(attached):
            assert weights.lease is not None
            assert (weights.lease.state, weights.lease.resumes) == ("connected", 0)
            weights.verify()
            assert (weights.generation, weights.version, raw(weights["model.norm.weight"])) == had[rank]
            held = Changer(ranks[rank]).state().generation(weights.generation)
            assert held is not None
            assert held.leases == 1


def worker_at(rank: Daemon) -> psutil.Process:
    """The worker that takes what is pushed."""
    children = psutil.Process(rank.report().pid).children()
    (worker,) = [one for one in children if "weightcached.loader.worker" in one.cmdline()]
    return worker


@pytest.mark.parametrize("step", STEPS)
def test_a_trainer_that_is_killed(ranks: list[Daemon], model: Path, step: str) -> None:
    """At every step. By themselves the ranks give its push up, with all that there is of it and nothing else; where the
    decision was written, both go on to serve what it pushed.
    """
    before, first = versions(ranks), len(ranks[0].log.lines)
    with engines(ranks):
        with start_trainer(ranks, step) as trainer:
            assert trainer.wait(TIMEOUT_S) == -signal.SIGKILL
        outcome = ranks[0].wait_logged("change decided", first=first)["outcome"]
        assert outcome == ("committed" if step == "decided" else "aborted") or step == "deciding"
        eventually_nothing_left(ranks)
        after = versions(ranks)
        assert after[0] == after[1]
        assert (after == before) is (outcome == "aborted")
    version = publish(trained(model, 3.0 + list(STEPS).index(step) / 16), **where(ranks))
    assert versions(ranks) == [version, version] != after


@pytest.mark.parametrize("step", ["between buckets", "prepared"])
def test_a_trainer_that_is_stopped(ranks: list[Daemon], model: Path, step: str) -> None:
    """And not killed: it is given up as well, soon after the time that it had given itself. Once it goes on it learns
    that.
    """
    before, first = versions(ranks), len(ranks[0].log.lines)
    with engines(ranks), start_trainer(ranks, step, "4") as trainer:
        try:
            assert ranks[0].wait_logged("change decided", first=first)["outcome"] == "aborted"
            assert psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED
            assert versions(ranks) == before
            version = publish(trained(model, 4.0), **where(ranks))
            assert versions(ranks) == [version, version]
            trainer.send_signal(signal.SIGCONT)
            said, _ = trainer.communicate(timeout=TIMEOUT_S)
        finally:
            trainer.kill()
    assert said.split()[0] in ("stage_lost", "daemon_not_ready", "update_conflict"), said
    assert versions(ranks) == [version, version]
    assert left_behind(ranks) == []


KILLS: dict[str, tuple[Callable[[Daemon], None], type[WeightCacheError]]] = {
    "worker": (lambda rank: worker_at(rank).kill(), WorkerDied),
    "keeper": (kill_and_wait, DaemonUnreachable),
}
KILLED_AT = ("between buckets", "finished at one rank", "digests", "no version yet", "prepared")
LOSSES = [*product(KILLS, KILLED_AT[:-1]), ("keeper", "prepared")]  # which has no worker any more


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("victim", "step"), LOSSES)
def test_one_rank_loses_its(ranks: list[Daemon], model: Path, rank: int, victim: str, step: str) -> None:
    """While the trainer is at that step. What was prepared at every rank is so still, and becomes what all serve."""
    before, (kill, error) = versions(ranks), KILLS[victim]
    with start_trainer(ranks, step, "60") as trainer:
        try:
            changed = os.waitid(os.P_PID, trainer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert changed is not None
            assert changed.si_code == os.CLD_STOPPED
            kill(ranks[rank])
            trainer.send_signal(signal.SIGCONT)
            said, _ = trainer.communicate(timeout=TIMEOUT_S)
        finally:
            trainer.kill()
    assert said.split()[0] == ("committed" if step == "prepared" else error.code), said
    eventually_nothing_left(ranks)
    after = versions(ranks)
    assert after[0] == after[1]
    assert (after == before) is (step != "prepared")
    new = 8.0 + (2 * LOSSES.index((victim, step)) + rank) / 8  # as served by no test before: else nothing would change
    version = publish(trained(model, new), **where(ranks))
    assert versions(ranks) == [version, version] != after


@pytest.mark.slow
def test_a_group_that_lacks_a_rank_is_not_pushed_to(model: Path, runtime_dir: Path) -> None:
    """Whether it is lost when both have begun to prepare, or before anything is begun."""
    with group(model, runtime_dir, size=2, scripts={0: None, 1: None}) as both:
        before = both[0].report().generation

        class LosesOne(Where):
            async def group(self) -> Group:
                found = await super().group()
                if all(state.change is not None for _, state in found.states()) and both[1].process.poll() is None:
                    both[1].stop(signal.SIGKILL)
                    found = await super().group()
                return found

        terms: dict[str, Any] = {"keep": None, "wait": False, "force": False, **BUCKETS}
        for kind in (LosesOne, Where):
            here = kind.of(runtime_dir=runtime_dir, timeout_s=600.0)
            publication = Publication(here, trainer="the test", partial=True, **terms)
            with pytest.raises(DaemonUnreachable, match=r"not every rank.*without tp1of2"), publication:
                pytest.fail("a push was begun at one rank of two")
            assert not here.deadline.passed
        state = Changer(both[0]).state()
        assert (state.open, state.current, len(state.generations)) == (None, before, 1)


def test_ranks_that_are_stopped_are_not_waited_for_beyond_the_deadline(ranks: list[Daemon], model: Path) -> None:
    """Their keepers, too, which therefore do not say that the change was given up."""
    before, tensors = versions(ranks), trained(model, 6.0)

    def push_on(publication: Publication) -> None:
        for name, tensor in [*tensors.items()] * 40:  # more than the buckets hold
            publication.push(name, tensor)

    with stage(**where(ranks)) as publication:
        stopped = [*map(worker_at, ranks), *(psutil.Process(rank.report().pid) for rank in ranks)]
        for push, process in zip(publication._begun * 2, stopped, strict=True):
            push._deadline = Deadline.after(1.0)  # all but that has gone by
            process.suspend()
        try:
            with pytest.raises(DaemonNotReady, match=r"worker has not taken.*host-tp.*worker is stopped"):
                push_on(publication)
        finally:
            for process in stopped:
                process.resume()
    assert (versions(ranks), waiting(ranks)) == (before, [])
    version = publish(tensors, **where(ranks))
    assert versions(ranks) == [version, version]
