"""A trainer that ends at a step of its push, as by SIGKILL, or is stopped there; over all ranks of a group of two.

    python -m tests.client.publish.dying_trainer RUNTIME_DIR STEP [TIMEOUT_S]

With a time it is stopped instead of killed, and says how the push has ended if it goes on.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np

from weightcached.client.control.coordinator import Coordinator
from weightcached.client.control.course import Ask, Verb
from weightcached.client.publish import stage
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Given, shape_of
from weightcached.protocol.control import AwaitChange, RankState
from weightcached.protocol.control_channel import ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.messages import Message
from weightcached.protocol.push_messages import Assign, Bucket, Finish

End = Callable[[], None]
AT_ONCE_S = 0.004
"""Within which a decision that was asked for is written, or is not yet."""


def called(owner: type, name: str, number: int, end: End) -> None:
    """Once that has been done so many times."""
    original, calls = getattr(owner, name), count(1)

    def ending(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        if next(calls) == number:
            end()
        return done

    is_bound = hasattr(original, "__self__")  # a class's method
    setattr(owner, name, staticmethod(ending) if is_bound else ending)


def said(kind: type[Message], number: int, end: End, *, before: bool = False) -> None:
    """Once so many messages of a kind have been said to workers; or ``before`` the last of these. None of them is said
    beside another, nor while this process ends.
    """
    original, calls, one_at_a_time = RankPush._say, count(1), threading.Lock()

    def say(push: RankPush, message: Message) -> None:
        if not isinstance(message, kind):
            return original(push, message)
        with one_at_a_time:
            is_it = next(calls) == number
            if is_it and before:
                end()
            original(push, message)
            if is_it and not before:
                end()

    RankPush._say = say  # type: ignore[method-assign, assignment]


def prepared_at(rank: int, end: End) -> None:
    """When that rank has prepared the change, and the other was given no version."""
    original, begin, transactions = RankPush.assign, RankPush.begin, []

    def begin_known(*args: Any, transaction: str, **kwargs: Any) -> RankPush:
        transactions.append(transaction)
        return begin(*args, transaction=transaction, **kwargs)

    def assign(push: RankPush, version: str) -> None:
        if not push.place.device.startswith(f"host-tp{rank}"):
            threading.Event().wait()
        original(push, version)
        deadline = Deadline.after(60)
        state = ask_blocking(
            push.place, AwaitChange(transaction=transactions[0], timeout_s=60), RankState, deadline=deadline
        )
        assert state.change is not None
        assert state.change.state == "prepared", state.change
        end()

    RankPush.begin = staticmethod(begin_known)  # type: ignore[method-assign]
    RankPush.assign = assign  # type: ignore[method-assign, assignment]


def deciding(end: End, *, asked: bool, answered: bool = False) -> None:
    """When all have prepared the change: before rank 0 is asked to commit it, just when it is, or before anybody acts
    upon its answer.
    """
    original = Coordinator._answer

    async def answer(coordinator: Coordinator, one: Ask) -> Any:
        if one.verb is not Verb.COMMIT:
            return await original(coordinator, one)
        if not asked:
            end()
            return await original(coordinator, one)
        asking = asyncio.ensure_future(original(coordinator, one))
        await asyncio.wait({asking}, timeout=None if answered else random.uniform(0, AT_ONCE_S))
        end()
        return await asking

    Coordinator._answer = answer  # type: ignore[method-assign, assignment]


STEPS: dict[str, Callable[[End], None]] = {
    "staged at rank 0": partial(called, RankPush, "begin", 1),
    "staged": partial(called, RankPush, "begin", 2),
    "in a bucket": partial(called, Given, "copy", 3),
    "between buckets": partial(said, Bucket, 2),
    "all in buckets": partial(said, Finish, 1, before=True),
    "finished at one rank": partial(said, Finish, 1),
    "digests": partial(said, Finish, 2),
    "no version yet": partial(said, Assign, 1, before=True),
    "prepared at rank 0": partial(prepared_at, 0),
    "prepared at rank 1": partial(prepared_at, 1),
    "prepared": partial(deciding, asked=False),
    "deciding": partial(deciding, asked=True),
    "decided": partial(deciding, asked=True, answered=True),
}
"""In their order. How ``deciding`` ends is open; only after that the change is committed."""


def filled(box: Box) -> Any:
    return np.full(shape_of(box), 0.5, ml_dtypes.bfloat16)


def main(runtime_dir: str, step: str, timeout_s: str = "") -> None:
    # Sent to the thread that calls it, which goes no step further: a process's is taken by any of its threads.
    STEPS[step](lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if timeout_s else signal.SIGKILL))
    try:
        with stage(
            runtime_dir=runtime_dir, bucket_nbytes=64 * 1024, bucket_count=2, timeout_s=float(timeout_s or 60)
        ) as publication:
            for name in publication.names:
                publication.push(name, filled)
            publication.commit()
        print("committed")
    except WeightCacheError as error:
        print(error.code, error)


if __name__ == "__main__":
    main(*sys.argv[1:])
