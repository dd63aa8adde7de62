"""One rank's side of a push: the stage at its daemon, the buckets, and the conversation with its worker.

Owns the connection to the daemon, the socket to the worker and the mapped buckets, until closed. One thread at a time.
Pieces gather in a bucket until it is full; then it is the worker's until that says it is free: whoever is faster than
the worker waits here, and no more memory is taken than the buckets'.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
from collections import deque
from contextlib import ExitStack, suppress
from typing import TypeVar

import xxhash

from weightcached.client import forks, options
from weightcached.client.connect import reach
from weightcached.client.exchange import error_of, require_no_descriptors
from weightcached.client.publish.cutting import parts
from weightcached.client.publish.values import Box, Given, box_of, shape_of, start_of
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import (
    ContractError,
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    ProtocolError,
    TransferError,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.memory import host
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    WAIT_MAX_S,
    GiveUp,
    Loading,
    Message,
    Refused,
    Stage,
    Staged,
)
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place
from weightcached.protocol.push_messages import (
    PIECE_ALIGNMENT_BYTES,
    PIECES_MAX,
    TRAINER_TO_WORKER,
    WORKER_TO_TRAINER,
    Assign,
    Bucket,
    Filled,
    Finish,
    Free,
    Piece,
    Wanted,
    WantedTensor,
)

GIVING_UP_S = 2.0
"""What a trainer whose time is over may take to say so by itself, before daemons give it up."""
REASON_MAX = 4096
"""Characters of why a trainer gives up."""
_REASON_TIMEOUT_S = 20.0
"""For the daemon to say why its worker is gone."""
_Kind = TypeVar("_Kind", bound=Message)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RankPush:
    """Made by :meth:`begin`. What any method raises ends the push: close it then. It raises what the daemon refuses
    with, DaemonUnreachable when that is gone, DaemonNotReady where the worker has not taken or said something by
    ``deadline``, which is for all of it, ContractError, and what reading the trainer's tensors raises.
    """

    def __init__(self, place: Place, daemon: Channel, staged: Staged, held: ExitStack, *, deadline: Deadline) -> None:
        self.place = place
        self.staged = staged
        self._deadline = deadline
        self.table: dict[str, WantedTensor] = {}
        self._daemon = daemon
        self._held = held
        self._numbers: dict[str, int] = {}
        self._buckets: list[memoryview] = []
        self._free: deque[int] = deque()
        self._current: int | None = None
        self._used_nbytes = 0
        self._pieces: list[Piece] = []
        self._pieces_in_all = 0
        self._worker: Channel | None = None

    @classmethod
    def begin(
        cls,
        place: Place,
        *,
        transaction: str,
        name: str,
        bucket_nbytes: int,
        bucket_count: int,
        allowed: AllowList,
        deadline: Deadline,
    ) -> RankPush:
        """Open a stage at the place's daemon, which prepares that transaction for a trainer. Blocks until the worker
        has said what it wants.
        """
        with ExitStack() as held:
            connection = reach(place, allowed=allowed, deadline=deadline, appear_by=Deadline.after(0))
            if connection is None:
                raise DaemonAbsent(
                    "no daemon is there to push to",
                    where=place.socket_path,
                    next_step="start it again (`weightcached up`), and push then",
                )
            daemon = Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
            held.callback(daemon.close)
            stage = Stage(
                client_version=options.client_version(),
                name=name,
                pid=os.getpid(),
                transaction=transaction,
                timeout_s=min(deadline.remaining_s() + GIVING_UP_S, WAIT_MAX_S),
                bucket_nbytes=bucket_nbytes,
                bucket_count=bucket_count,
            )
            staged, fds = _staged(daemon, stage, where=str(place.socket_path), deadline=deadline)
            held.pop_all()
        return cls.of(place, daemon, staged, fds, deadline=deadline)

    @classmethod
    def of(cls, place: Place, daemon: Channel, staged: Staged, fds: OwnedFds, *, deadline: Deadline) -> RankPush:
        """The push of a stage that a daemon has answered; takes its channel and descriptors over."""
        with ExitStack() as held, fds:
            held.callback(daemon.close)
            push = cls(place, daemon, staged, held, deadline=deadline)
            forks.in_child(push, RankPush.close)
            push._take(fds)
            push._hear_wanted()
            push._held = held.pop_all()
            return push

    def _take(self, fds: OwnedFds) -> None:
        staged, where = self.staged, str(self.place.socket_path)
        if len(fds) != 1 + staged.bucket_count or not staged.bucket_count:
            raise TransferError(
                "another number of descriptors came than a stage has",
                expected=1 + staged.bucket_count,
                found=len(fds),
                where=where,
            )
        worker = Channel(socket.socket(fileno=fds.take(0)), outgoing=TRAINER_TO_WORKER, incoming=WORKER_TO_TRAINER)
        self._held.callback(worker.close)
        self._worker = worker
        for number in range(staged.bucket_count):
            fd = fds[1 + number]
            _check_bucket(fd, staged.bucket_nbytes, where)
            mapping = self._held.enter_context(host.map_shared(fd, nbytes=staged.bucket_nbytes))
            self._buckets.append(mapping.view())
        self._held.callback(self._buckets.clear)
        self._free.extend(range(staged.bucket_count))

    def _hear_wanted(self) -> None:
        while True:
            page = self._hear(Wanted)
            for tensor in page.tensors:
                self._numbers[tensor.name] = len(self.table)
                self.table[tensor.name] = tensor
            if page.last:
                return

    # Pushing

    def boxes(self, name: str) -> list[Box]:
        """Which parts of the tensor this rank needs; none where it knows no such tensor."""
        wanted = self.table.get(name)
        return [] if wanted is None else [box_of(one.start, one.shape) for one in wanted.boxes]

    def push(self, name: str, given: Given, box: Box) -> None:
        """These elements of ``name``, which lie within one of its boxes, into buckets. What was given may change when
        this returns.
        """
        itemsize = itemsize_bytes(self.table[name].dtype)
        for part in parts(box, itemsize, self._room, self.staged.bucket_nbytes):
            nbytes = math.prod(shape_of(part)) * itemsize
            memory = self._place(nbytes)
            given.copy(part, memory)
            hasher = xxhash.xxh3_128()  # its `update` lets other threads run meanwhile
            hasher.update(memory)
            self._pieces.append(
                Piece(
                    tensor=self._numbers[name],
                    start=start_of(part),
                    shape=shape_of(part),
                    offset=self._used_nbytes,
                    xxh3=hasher.hexdigest(),
                )
            )
            self._used_nbytes = -(-(self._used_nbytes + nbytes) // PIECE_ALIGNMENT_BYTES) * PIECE_ALIGNMENT_BYTES

    def _room(self) -> int:
        """Bytes that a piece may have that goes into the bucket that is being filled, or into a fresh one."""
        return max(0, self.staged.bucket_nbytes - self._used_nbytes)

    def _place(self, nbytes: int) -> memoryview:
        """Room for a piece, at the end of what is in the bucket or at the beginning of another. Waits for that."""
        self._require_open()
        if self._current is not None and (nbytes > self._room() or len(self._pieces) == PIECES_MAX):
            self.hand_over()
        if self._current is None:
            while not self._free:
                self._free.append(self._hear(Free).number)
            self._current = self._free.popleft()
        return self._buckets[self._current][self._used_nbytes : self._used_nbytes + nbytes]

    def hand_over(self) -> None:
        """Give the worker what is in the bucket, if anything is."""
        if self._current is None:
            return
        self._say(Bucket(number=self._current, pieces=tuple(self._pieces)))
        self._pieces_in_all += len(self._pieces)
        self._current, self._used_nbytes, self._pieces = None, 0, []

    # The end

    def finish(self) -> None:
        """That was all."""
        self.hand_over()
        self._say(Finish(pieces=self._pieces_in_all))

    def filled(self) -> Filled:
        """What the rank holds now. Blocks until all of it is there, and checked."""
        return self._hear(Filled)

    def assign(self, version: str) -> None:
        """That is its version. The daemon has what it needs; the change is prepared when the control plane says so, and
        until it is decided this is to be kept open.
        """
        self._say(Assign(version=version))

    def give_up(self, reason: str, *, deadline: Deadline) -> None:
        """Have the daemon know why the push ends, if it listens: then :meth:`hear_out` and :meth:`close`. Of no effect
        once it is closed, and in a forked child.
        """
        if self._worker is None:
            return
        with suppress(PeerClosed, TimeoutError):
            self._daemon.send(GiveUp(reason=reason[:REASON_MAX]), deadline=deadline)

    def hear_out(self, *, deadline: Deadline) -> None:
        """Wait until the daemon has ended the push, too, so that it is over for the reason that was given."""
        if self._worker is None:
            return
        with suppress(PeerClosed, TimeoutError, ContractError):
            while True:
                self._daemon.receive(deadline=deadline).fds.close()

    def close(self) -> None:
        """Give everything back: a push that is not finished is given up by the daemon. In a forked child only its own
        copies are closed, before anything else runs there; the push goes on in its parent. Safe to call twice.
        """
        self._worker = None
        self._held.close()

    # The conversation

    def _say(self, message: Message) -> None:
        try:
            self._require_open().send(message, deadline=self._deadline)
        except PeerClosed:
            raise self._reason() from None
        except TimeoutError as error:
            raise self._late() from error

    def _hear(self, kind: type[_Kind]) -> _Kind:
        while True:
            try:
                frame = self._require_open().receive(deadline=self._deadline)
            except PeerClosed:
                raise self._reason() from None
            except TimeoutError as error:
                raise self._late() from error
            frame.fds.close()
            if isinstance(frame.message, kind):
                return frame.message
            if not isinstance(frame.message, Free):
                raise ProtocolError(
                    "the worker spoke out of turn", expected=kind.__name__, found=type(frame.message).__name__
                )
            self._free.append(frame.message.number)

    def _late(self) -> DaemonNotReady:
        return DaemonNotReady(
            "the push was not over in time: the rank's worker has not taken or said what was next",
            where=self.place.socket_path,
            next_step="allow more time (timeout_s), or look whether that worker is stopped or starved",
        )

    def _require_open(self) -> Channel:
        """The worker's connection."""
        if self._worker is None:
            raise ValueError("the push has not begun, is closed, or is that of the process that forked this one")
        return self._worker

    def _reason(self) -> WeightCacheError:
        """Why the worker has hung up: the daemon says it."""
        where = str(self.place.socket_path)
        deadline = Deadline.after(_REASON_TIMEOUT_S)
        try:
            while True:
                frame = self._daemon.receive(deadline=deadline)
                require_no_descriptors(frame, where)
                if isinstance(frame.message, Refused):
                    return error_of(frame.message, where)
        except (PeerClosed, TimeoutError, ContractError) as error:
            return DaemonUnreachable(
                "the daemon ended during the push, without a word",
                found=str(error),
                where=where,
                next_step="look into the daemon's log, and push again when it serves",
            )


def _staged(daemon: Channel, stage: Stage, *, where: str, deadline: Deadline) -> tuple[Staged, OwnedFds]:
    try:
        daemon.send(stage, deadline=deadline)
        while True:
            frame = daemon.receive(deadline=deadline)
            if isinstance(frame.message, Staged):
                return frame.message, frame.fds
            require_no_descriptors(frame, where)
            if isinstance(frame.message, Refused):
                raise error_of(frame.message, where)
            if not isinstance(frame.message, Loading):
                raise ProtocolError(
                    "the daemon answered something that was not asked",
                    expected="Loading, Staged or Refused",
                    found=type(frame.message).__name__,
                    where=where,
                )
    except TimeoutError as error:
        raise DaemonNotReady("the daemon had not staged the push before the deadline", where=where) from error
    except PeerClosed as error:
        raise DaemonUnreachable("the daemon ended before the push had begun", where=where) from error


def _check_bucket(fd: int, nbytes: int, where: str) -> None:
    """Memory that can become shorter kills who writes there."""
    found = os.fstat(fd).st_size
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError("a bucket is not memory", found=error.strerror, where=where) from error
    if found != nbytes or seals & _SEALS != _SEALS:
        raise TransferError(
            "a bucket is not what was announced",
            expected=f"{nbytes} bytes, sealed against resizing",
            found=f"{found} bytes, seals {seals:#x}",
            where=where,
        )
