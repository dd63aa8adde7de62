"""Changes of a rank's weights for tests, asked for over the control plane one command at a time."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager

from tests.support.daemons import TIMEOUT_S, Daemon
from weightcached.client.publish.rank import RankPush
from weightcached.protocol.control import (
    AwaitChange,
    ChangeInfo,
    Decide,
    Decided,
    Describe,
    Drop,
    FromTrainer,
    Open,
    Prepare,
    RankState,
)
from weightcached.protocol.control_channel import ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.peers import AllowList


def describe(served: Daemon) -> RankState:
    """What the daemon says of itself."""
    return ask_blocking(served.place, Describe(), RankState, deadline=Deadline.after(TIMEOUT_S))


def begin_push(served: Daemon, *, partial: bool = False) -> str:
    """Open and prepare, at a leader, a change that waits for a trainer. Returns its transaction."""
    base, transaction = describe(served).current, secrets.token_hex(16)
    assert base is not None
    deadline = Deadline.after(TIMEOUT_S)
    ask_blocking(served.place, Open(transaction=transaction, base=base), RankState, deadline=deadline)
    prepare = Prepare(
        transaction=transaction, leader=served.place.device, base=base, source=FromTrainer(partial=partial)
    )
    ask_blocking(served.place, prepare, RankState, deadline=deadline)
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


def await_change(served: Daemon, transaction: str) -> ChangeInfo:
    """How its preparing has ended."""
    ask = AwaitChange(transaction=transaction, timeout_s=TIMEOUT_S)
    state = ask_blocking(served.place, ask, RankState, deadline=Deadline.after(TIMEOUT_S))
    assert state.change is not None
    assert state.change.transaction == transaction
    return state.change


def drop(served: Daemon, generation: str) -> None:
    """Have a previous generation freed."""
    ask_blocking(served.place, Drop(generation=generation, force=True), RankState, deadline=Deadline.after(TIMEOUT_S))


def decide(served: Daemon, transaction: str, *, commit: bool) -> Decided:
    return ask_blocking(
        served.place, Decide(transaction=transaction, commit=commit), Decided, deadline=Deadline.after(TIMEOUT_S)
    )
