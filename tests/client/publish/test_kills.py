"""Whoever is killed in the middle of a push: both ranks serve what they served, and the next push goes through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.client.publish.test_publish import trained, where
from tests.support.daemons import TIMEOUT_S, Daemon
from tests.support.groups import kill_and_wait, versions, waiting
from tests.support.unprivileged import ROOT
from weightcached.client.publish import publish, stage
from weightcached.client.publish.session import Publication
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable, WeightCacheError, WorkerDied

TRAINER = """
import sys
from pathlib import Path
from tests.client.publish.test_publish import trained
from weightcached.client.publish import stage
tensors = list(trained(Path(sys.argv[1]), 2.0).items())
with stage(runtime_dir=sys.argv[2], bucket_nbytes=64 * 1024, bucket_count=2) as publication:
    for name, tensor in tensors[: len(tensors) // 2]:
        publication.push(name, tensor)
    print("half", flush=True)
    sys.stdin.read()
"""


@contextmanager
def trainer_at_half(model: Path, ranks: list[Daemon]) -> Iterator[subprocess.Popen[str]]:
    """A trainer's process that has pushed half of it, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(model), str(ranks[0].place.runtime_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def worker_at(rank: Daemon) -> psutil.Process:
    """The worker that takes what is pushed."""
    children = psutil.Process(rank.report().pid).children()
    (worker,) = [one for one in children if "weightcached.loader.worker" in one.cmdline()]
    return worker


def test_a_trainer_that_is_killed(ranks: list[Daemon], model: Path) -> None:
    before = versions(ranks)
    lines = [len(rank.log.lines) for rank in ranks]
    with trainer_at_half(model, ranks) as trainer:
        trainer.send_signal(signal.SIGKILL)
        assert trainer.wait(TIMEOUT_S) == -signal.SIGKILL
    for rank, first in zip(ranks, lines, strict=True):
        rank.wait_logged("the change failed", code="stage_lost", first=first)
    ranks[0].wait_logged("change decided", outcome="aborted", first=lines[0])
    assert (versions(ranks), waiting(ranks)) == (before, [])
    version = publish(trained(model, 3.0), **where(ranks))
    assert versions(ranks) == [version, version]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kill", "error"),
    [(lambda rank: worker_at(rank).kill(), WorkerDied), (kill_and_wait, DaemonUnreachable)],
    ids=["worker", "keeper"],
)
def test_one_rank_loses_its(
    ranks: list[Daemon], model: Path, rank: int, kill: Callable[[Daemon], None], error: type[WeightCacheError]
) -> None:
    before, tensors = versions(ranks), list(trained(model, 4.0).items())

    def push_with_a_kill() -> None:
        with stage(**where(ranks)) as publication:
            for name, tensor in tensors[: len(tensors) // 2]:
                publication.push(name, tensor)
            kill(ranks[rank])
            for name, tensor in tensors[len(tensors) // 2 :]:
                publication.push(name, tensor)
            publication.commit()

    with pytest.raises(error):
        push_with_a_kill()
    assert (versions(ranks), waiting(ranks)) == (before, [])
    version = publish(trained(model, 5.0 + rank), **where(ranks))
    assert versions(ranks) == [version, version]


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
