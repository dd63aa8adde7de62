"""Pushing to one real daemon, which is a leader, step by step: for tests of what each step, and its failing, leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from tests.support.commanding import Changer, new_transaction
from tests.support.daemons import TIMEOUT_S, Daemon
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Given
from weightcached.protocol.assigned import assigned_version
from weightcached.protocol.control import ChangeInfo, Decided, Drop, FromTrainer, RankState
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.peers import AllowList


def describe(served: Daemon) -> RankState:
    """What the daemon says of itself."""
    return Changer(served).state()


def begin_push(served: Daemon, *, partial: bool = False) -> str:
    """Open and prepare a change that waits for a trainer. Returns its transaction."""
    changer, transaction = Changer(served), new_transaction()
    changer.open(transaction)
    changer.begin(transaction, FromTrainer(partial=partial))
    return transaction


@contextmanager
def push_begun(
    served: Daemon, transaction: str, *, bucket_nbytes: int = 64 * 1024, bucket_count: int = 3
) -> Iterator[RankPush]:
    """A stage for that change."""
    begun = RankPush.begin(
        served.place,
        transaction=transaction,
        name="the trainer",
        bucket_nbytes=bucket_nbytes,
        bucket_count=bucket_count,
        allowed=AllowList(),
        deadline=Deadline.after(TIMEOUT_S),
    )
    with closing(begun) as push:
        yield push


def push_all(push: RankPush, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every box of each."""
    for name, tensor in tensors.items():
        for box in push.boxes(name):
            push.push(name, Given(push.table[name], tensor, tuple(slice(0, extent) for extent in tensor.shape)), box)


def finish(push: RankPush) -> str:
    """All is pushed: assign a version, as the only rank there is. Returns it."""
    push.finish()
    version = assigned_version(push.staged.base_version, {push.place.device: push.filled().resident})
    push.assign(version)
    return version


def await_change(served: Daemon, transaction: str) -> ChangeInfo:
    """How its preparing has ended."""
    change = Changer(served).ended(transaction).change
    assert change is not None
    return change


def drop(served: Daemon, generation: str) -> None:
    """Have a previous generation freed."""
    Changer(served).ask(Drop(generation=generation, force=True), RankState)


def decide(served: Daemon, transaction: str, *, commit: bool) -> Decided:
    return Changer(served).decide(transaction, commit=commit)
