"""The worker's conversation with a trainer: what is wanted, buckets, and in the end the version.

Owns its order. One thread receives, a crew delivers what is in buckets. Why a push fails is said to the keeper, which
tells the trainer; here the socket just ends. The bytes' way is ``receiving.py``'s.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from weightcached.loader.boxes import Box
from weightcached.loader.destination import Target, as_destination, descriptors
from weightcached.loader.execute import PROGRESS_EVERY_S, Executed, Progress
from weightcached.loader.layout import Placement
from weightcached.loader.pushed.base import Base
from weightcached.loader.pushed.crew import Crew
from weightcached.loader.pushed.ledger import Ledger
from weightcached.loader.pushed.receiving import Deliverer, Delivery, Receiving
from weightcached.loader.pushed.wanted import Pushable, pages
from weightcached.protocol.channel import Channel
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import ProtocolError, StageLost
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Message
from weightcached.protocol.push_messages import (
    TRAINER_TO_WORKER,
    WORKER_TO_TRAINER,
    Assign,
    Bucket,
    Filled,
    Finish,
    Free,
    Piece,
)

THREADS = max(1, min(2, len(os.sched_getaffinity(0))))
"""That deliver. Every rank of the host has as many, and the trainer works meanwhile."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a push left besides the segments' bytes."""

    executed: Executed
    pushed_nbytes: int
    kept_nbytes: int


@dataclass(slots=True)
class _Buckets:
    """``views``: their bytes. ``full``: those that the trainer has handed over and not been given back."""

    views: list[memoryview]
    full: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Trainer:
    """The worker's end of a push. Owns ``connection``, until it is closed. Used once, from one thread."""

    def __init__(self, connection: socket.socket, table: Sequence[Pushable]) -> None:
        self._channel = Channel(connection, outgoing=WORKER_TO_TRAINER, incoming=TRAINER_TO_WORKER)
        self._table = table
        self._ledger = Ledger(table)
        self._sending = threading.Lock()
        self._pushed_nbytes = 0
        self._wanted_nbytes = sum(one.nbytes for one in table)
        self._next_report_s = time.monotonic()

    def receive(
        self,
        placement: Placement,
        segments: Target,
        buckets: Sequence[int],
        *,
        bucket_nbytes: int,
        base: Base | None,
        progress: Progress | None = None,
        threads: int = THREADS,
    ) -> Received:
        """Fill ``segments``, fresh memory of the placement's sizes, with what comes; with ``base`` what does not is
        taken from there. ``buckets`` are readable descriptors; they stay the caller's. Blocks for as long as the
        trainer takes.

        Raises StageLost when it went away, PushMismatch, TransferError, UnusableValue, InsufficientMemory, and what
        ``progress`` raises.
        """
        destination = as_destination(segments, placement.segments_nbytes)
        with ExitStack() as held:
            mappings = [held.enter_context(host.map_readonly(fd, nbytes=bucket_nbytes)) for fd in buckets]
            shared = _Buckets([mapping.view() for mapping in mappings])
            held.callback(shared.views.clear)
            held.enter_context(destination)
            receiving = Receiving(placement, destination, descriptors(segments))
            with Crew(receiving, threads, self._hang_up) as crew:
                try:
                    self._take_all(shared, crew, progress)
                except PeerClosed as error:
                    if crew.failure is not None:
                        raise crew.failure from None
                    raise _lost() from error
                crew.settle()
                self._ledger.require_whole(partial=base is not None)
                begun = self._ledger.names_begun
                for filling in receiving.unfinished():
                    crew.give(partial(Deliverer.keep, filling=filling, base=base, begun=begun))
                crew.settle()
            destination.finish()
        digests = _with_aliases(receiving.digests, placement)
        return Received(Executed(digests, {}), self._pushed_nbytes, receiving.kept_nbytes)

    def _take_all(self, buckets: _Buckets, crew: Crew, progress: Progress | None) -> None:
        for page in pages(self._table):
            self._say(page)
        while True:
            message = self._hear()
            if isinstance(message, Bucket):
                deliveries = self._checked(message, buckets)
                crew.give(partial(self._deliver, number=message.number, deliveries=deliveries, buckets=buckets))
                self._report(progress)
            elif isinstance(message, Finish):
                if message.pieces != self._ledger.pieces:
                    raise ProtocolError("pieces are missing", expected=message.pieces, found=self._ledger.pieces)
                return
            else:
                raise _out_of_turn(message, "Bucket or Finish")

    def _checked(self, message: Bucket, buckets: _Buckets) -> list[Delivery]:
        """The bucket's pieces, each one that may come and that lies within the bucket."""
        with buckets.lock:
            if message.number >= len(buckets.views) or message.number in buckets.full:
                raise ProtocolError(
                    "the trainer handed over a bucket that is not its own",
                    expected=f"one of {len(buckets.views)}, free",
                    found=message.number,
                )
            buckets.full.add(message.number)
        return [self._delivery(piece, buckets.views[message.number]) for piece in message.pieces]

    def _delivery(self, piece: Piece, bucket: memoryview) -> Delivery:
        box = Box(piece.start, piece.shape)
        one = self._ledger.take(piece.tensor, box)
        nbytes = box.volume * itemsize_bytes(one.dtype)
        if piece.offset + nbytes > len(bucket) or piece.offset % itemsize_bytes(one.dtype):
            raise ProtocolError(
                f"a piece of {one.name} does not lie in its bucket",
                expected=f"{nbytes} bytes within {len(bucket)}",
                found=f"from byte {piece.offset}",
            )
        self._pushed_nbytes += nbytes
        return Delivery(one, box, bucket[piece.offset : piece.offset + nbytes], bytes.fromhex(piece.xxh3))

    def _deliver(self, deliverer: Deliverer, *, number: int, deliveries: list[Delivery], buckets: _Buckets) -> None:
        for delivery in deliveries:
            deliverer.deliver(delivery)
        deliveries.clear()
        with buckets.lock:
            buckets.full.remove(number)
        try:
            self._say(Free(number=number))
        except PeerClosed as error:
            raise _lost() from error

    def _report(self, progress: Progress | None) -> None:
        now_s = time.monotonic()
        if progress is not None and now_s >= self._next_report_s:
            self._next_report_s = now_s + PROGRESS_EVERY_S
            progress(self._pushed_nbytes, self._wanted_nbytes)

    def assigned(self, resident: str, received: Received, *, unchanged: bool) -> str:
        """Tell the trainer what is resident now, and whether that is what was; the version that it makes of that.
        Raises StageLost.
        """
        try:
            self._say(
                Filled(
                    resident=resident,
                    pushed_nbytes=received.pushed_nbytes,
                    kept_nbytes=received.kept_nbytes,
                    unchanged=unchanged,
                )
            )
            message = self._hear()
        except PeerClosed as error:
            raise _lost() from error
        if not isinstance(message, Assign):
            raise _out_of_turn(message, "Assign")
        return message.version

    def _say(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)

    def _hear(self) -> Message:
        frame = self._channel.receive()
        frame.fds.close()
        return frame.message

    def _hang_up(self) -> None:
        """Wakes who waits for the trainer's next word: it is not wanted any more."""
        try:
            self._channel.connection.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the trainer was faster

    def close(self) -> None:
        self._channel.close()


def _with_aliases(digests: Mapping[str, bytes], placement: Placement) -> dict[str, bytes]:
    names = ((placed.parameter.name, placed.parameter.alias_of) for placed in placement.placed)
    return {name: digests[alias_of or name] for name, alias_of in names}


def _lost() -> StageLost:
    return StageLost("the trainer went away before all was pushed", next_step="push again")


def _out_of_turn(message: Message, expected: str) -> ProtocolError:
    return ProtocolError("the trainer spoke out of turn", expected=expected, found=type(message).__name__)
