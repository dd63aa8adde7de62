"""A push from its beginning to the decision: the change is opened and prepared at all ranks, pushed to, and committed.

Owns the coordinator's thread: ``client/control`` carries the change through all ranks on an event loop there, and the
caller's thread pushes meanwhile. They meet twice: when every rank takes what is pushed, and when all was pushed or
nothing more will be.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, overload

from weightcached.client.control.changes import Changed, change
from weightcached.client.control.group import Where
from weightcached.client.options import checked_flags, checked_text, is_whole_number
from weightcached.client.publish.group import GroupPush
from weightcached.client.publish.rank import RankPush
from weightcached.client.publish.values import Box, Value
from weightcached.protocol.control import FromTrainer
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import InvalidOption, ProtocolError, StageLost
from weightcached.protocol.messages import (
    BUCKET_MAX_NBYTES,
    BUCKET_MIN_NBYTES,
    BUCKET_MULTIPLE_NBYTES,
    BUCKETS_MAX,
    SHORT_TEXT_MAX,
)
from weightcached.protocol.text import one_line, shown

BUCKET_NBYTES = 16 << 20
SAYING_WHY_S = 3.0
"""For having all ranks know why a push is given up: they would find out that it is by themselves."""
BUCKET_COUNT = 3
"""At each rank: one is written, one read, and one on its way."""


class Publication:
    """Made by :func:`weightcached.client.publish.stage`; a context manager. Left without :meth:`commit` it is given up,
    and every rank serves what it served. Used from one thread, within its ``with`` block: ValueError outside, and after
    :meth:`commit`.
    """

    def __init__(
        self,
        where: Where,
        *,
        trainer: str,
        partial: bool,
        keep: int | None,
        wait: bool,
        force: bool,
        bucket_nbytes: int | None,
        bucket_count: int | None,
    ) -> None:
        checked_flags(partial=partial)
        if len(checked_text("trainer", trainer)) > SHORT_TEXT_MAX:
            raise InvalidOption(
                "the trainer's name is too long", expected=f"{SHORT_TEXT_MAX} characters", found=len(trainer)
            )
        self._where = where
        self._trainer = trainer
        self._source = FromTrainer(partial=partial)
        self._keep = keep
        self._wait = wait
        self._force = force
        self._buckets = {"bucket_nbytes": _checked_nbytes(bucket_nbytes), "bucket_count": _checked_count(bucket_count)}
        self.seconds: dict[str, float] = {}
        """What it took: ``begin`` until ranks took what was pushed, ``push`` from the first tensor until all of it was
        there and digested, ``commit`` until all ranks served it."""
        self._first_s: float | None = None
        self._opened: Future[GroupPush] = Future()
        self._all_pushed: Future[None] = Future()
        self._all_pushed.set_running_or_notify_cancel()  # a coordinator that waits no longer does not make it done
        self._changed: Future[Changed] = Future()
        self._begun: list[RankPush] = []
        self._push: GroupPush | None = None
        self._thread = threading.Thread(target=self._run, name="weightcached-publish", daemon=True)

    # The coordinator's thread

    def _run(self) -> None:
        try:
            self._changed.set_result(asyncio.run(self._change()))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._changed.set_exception(error)
        if not self._opened.done():
            self._opened.set_exception(self._changed.exception() or StageLost("the change ended before it was pushed"))

    async def _change(self) -> Changed:
        changing: asyncio.Future[Any] = asyncio.ensure_future(
            change(self._where, self._source, keep=self._keep, wait=self._wait, force=self._force, begun=self._push_to)
        )
        ended: asyncio.Future[Any] = asyncio.wrap_future(self._all_pushed)
        await asyncio.wait({changing, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.cancel() and ended.exception() is not None and not self._opened.done():
            changing.cancel()  # nobody waits for this any more, for another's change to end perhaps
        changed: Changed = await changing
        return changed

    async def _push_to(self, transaction: str) -> None:
        """Every rank prepares: have them take what is pushed, and wait until the caller's thread is through. Raises
        DaemonUnreachable, DaemonNotReady or DaemonAbsent where one is not there any more: no push is begun then, which
        could not be committed.
        """
        group = await self._where.group()
        group.require_whole()
        places = [one.place for one in group.members if one.place is not None]

        def begin() -> None:
            for place in places:
                self._begun.append(
                    RankPush.begin(
                        place,
                        transaction=transaction,
                        name=self._trainer,
                        allowed=self._where.allowed,
                        deadline=self._where.deadline,
                        **self._buckets,
                    )
                )

        await asyncio.to_thread(begin)
        self._opened.set_result(GroupPush(self._begun))
        await asyncio.wrap_future(self._all_pushed)

    # The caller's thread

    def __enter__(self) -> Publication:
        began_s = time.monotonic()
        self._thread.start()
        try:
            self._push = self._opened.result()
            self.seconds["begin"] = time.monotonic() - began_s
        except BaseException as error:
            self._end(error)
            raise
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that are needed, in the order in which they lie in the checkpoint: the one to push in."""
        return self._open_push.names

    def boxes(self, name: str) -> Mapping[str, list[Box]]:
        """Which parts of a tensor each rank needs: device word of its place → boxes, with which ``tensor[box]`` can be
        said. What is not in any need not even be gathered. PushMismatch for an unknown name.
        """
        return self._open_push.boxes(name)

    @overload
    def push(self, name: str, value: Value, /) -> None: ...

    @overload
    def push(self, name: str, box: Sequence[slice], value: Value, /) -> None: ...

    def push(self, name: str, *given: object) -> None:
        """Push a tensor, or with a box that part of one: every rank is sent what it needs of it, once. ``value`` is a
        torch tensor (of any device), a NumPy array, or is called with a box to give one. When this returns it may be
        changed or freed. Blocks while ranks are behind.

        Raises PushMismatch for a name, dtype, shape or box that the checkpoint does not have, and whatever ended the
        push at a rank; then nothing more can be pushed.
        """
        self._first_s = self._first_s or time.monotonic()
        if len(given) == 1:
            self._open_push.push(name, given[0])  # type: ignore[arg-type]
        else:
            box, value = given
            self._open_push.push_box(name, box, value)  # type: ignore[arg-type]

    def commit(self) -> str:
        """All was pushed: have every rank check it, and all of them serve it, or none. Returns the version that they
        serve then: the one that they served, where every byte is what it was; then nothing has changed. Raises why it
        could not be: what is missing, by name, or what befell which rank.
        """
        push, self._push = self._open_push, None
        version = push.finish()
        all_there_s = time.monotonic()
        self._all_pushed.set_result(None)
        changed = self._changed.result()
        self.seconds["push"] = all_there_s - (self._first_s or all_there_s)
        self.seconds["commit"] = time.monotonic() - all_there_s
        if changed.version != version and not changed.already:
            raise ProtocolError(
                "another version was committed than was pushed", expected=version, found=changed.version
            )
        return changed.version

    @property
    def _open_push(self) -> GroupPush:
        if self._push is None:
            raise ValueError("the push has not begun, or is over: `with stage(…) as publication`, and commit() once")
        return self._push

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Wait for the change's end; what was not pushed whole is given up, and every rank told why: ``error``."""
        self._push = None
        if not self._all_pushed.done():
            reason = "it was left without a commit" if error is None else one_line(f"{type(error).__name__}: {error}")
            soon = Deadline.after(SAYING_WHY_S)
            for one in self._begun:
                one.give_up(reason, deadline=soon)
            for one in self._begun:
                one.hear_out(deadline=soon)
            self._all_pushed.set_exception(StageLost("the trainer gave the push up", next_step="push again"))
            self._close()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        if self._opened.done() and self._opened.exception() is None:
            self._opened.result().close()
        for one in self._begun:
            one.close()


def _checked_nbytes(nbytes: int | None) -> int:
    nbytes = BUCKET_NBYTES if nbytes is None else nbytes
    fits = is_whole_number(nbytes) and BUCKET_MIN_NBYTES <= nbytes <= BUCKET_MAX_NBYTES
    if not fits or nbytes % BUCKET_MULTIPLE_NBYTES:
        raise InvalidOption(
            "no size for a bucket",
            expected=f"a multiple of {BUCKET_MULTIPLE_NBYTES} from {BUCKET_MIN_NBYTES} to {BUCKET_MAX_NBYTES} bytes",
            found=shown(nbytes),
        )
    return nbytes


def _checked_count(count: int | None) -> int:
    count = BUCKET_COUNT if count is None else count
    if not (is_whole_number(count) and 1 <= count <= BUCKETS_MAX):
        raise InvalidOption("no number of buckets", expected=f"1 to {BUCKETS_MAX}", found=shown(count))
    return count


def default_trainer() -> str:
    """For people: `weightcached generations` shows who has pushed."""
    return f"process {os.getpid()}"
