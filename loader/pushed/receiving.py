"""From pieces in buckets to filled segments: every piece checked, brought to its place, and digested where it lies.

Owns the bytes' way. Any number of threads deliver pieces, each with a port of its own into the destination; which
pieces may come is the ledger's to say, before. What a failed push has written is of no use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from weightcached.loader.boxes import Box, Shape, intersection, is_contiguous, pieces, reach
from weightcached.loader.destination import Destination, Port
from weightcached.loader.layout import Placed, Placement
from weightcached.loader.planned import Copy, Quantize
from weightcached.loader.pushed.base import Base
from weightcached.loader.pushed.finishing import Finishing
from weightcached.loader.pushed.parameters import Filling, Pool, elements_of, slices, source_nbytes, zero
from weightcached.loader.pushed.wanted import Pushable, Use
from weightcached.loader.slabs import destination_of, paired
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import PushMismatch, TransferError

CHUNK_NBYTES = 512 << 10
"""Looked at, digested and written while it is in a core's own cache."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A piece: a box of tensor ``one``, and its bytes."""

    one: Pushable
    box: Box
    data: memoryview
    xxh3: bytes


class Receiving:
    """``segments``: their descriptors where they are a host's. All threads share this."""

    def __init__(self, placement: Placement, destination: Destination, segments: Sequence[int] | None) -> None:
        self.destination = destination
        self.segments = segments
        self.pool = Pool()
        self._fillings = {
            number: Filling.of(placed, on_host=segments is not None)
            for number, placed in enumerate(placement.placed)
            if placed.parameter.alias_of is None and placed.parameter.produced_by is None
        }
        self._made: dict[str, list[Placed]] = {}
        for placed in placement.placed:
            if placed.parameter.alias_of is None:
                self._made.setdefault(placed.parameter.produced_by or placed.parameter.name, []).append(placed)
        self._lock = threading.Lock()
        self.digests: dict[str, bytes] = {}
        """Parameter → XXH3-128 of its resident bytes, as far as they are finished; aliases are not in it."""
        self.kept_nbytes = 0

    def deliverer(self, port: Port) -> Deliverer:
        """For the calling thread, whose port it is."""
        return Deliverer(self, port)

    def finished(self, digests: dict[str, bytes]) -> None:
        """These parameters are where they belong."""
        with self._lock:
            self.digests |= digests

    def filling(self, number: int) -> Filling:
        return self._fillings[number]

    def made_with(self, name: str) -> list[Placed]:
        """The parameter, and what its quantization writes."""
        return self._made[name]

    def unfinished(self) -> list[Filling]:
        """Those that are not whole, and those that nothing is pushed to. When all that was pushed is delivered."""
        return [one for one in self._fillings.values() if one.placed.parameter.name not in self.digests]


class Deliverer:
    """One thread's part in it."""

    def __init__(self, receiving: Receiving, port: Port) -> None:
        self._all = receiving
        self._port = port
        self._chunk = memoryview(bytearray(CHUNK_NBYTES))
        self._copied = memoryview(b"")
        self._finishing = Finishing(receiving, port)

    def deliver(self, piece: Delivery) -> None:
        """Bring it to every parameter that has some of it. Raises TransferError where its bytes are not those that were
        announced, UnusableValue, InsufficientMemory.
        """
        uses = [(use, part) for use in piece.one.uses if (part := intersection(piece.box, use.copy.source)) is not None]
        targets = [destination_of(use.copy, part) for use, part in uses]
        if len(uses) == 1 and self._goes_straight(uses[0][0], targets[0], whole=uses[0][1] == piece.box):
            found = self._straight(self._all.filling(uses[0][0].parameter), piece, targets[0])
        else:
            data, found = self._private(piece.data)
            for (use, part), target in zip(uses, targets, strict=True):
                self._scatter(self._all.filling(use.parameter), use.copy, piece, data, part, target)
        if found != piece.xxh3:
            raise TransferError(
                f"a piece of {piece.one.name} is not what the trainer wrote",
                expected=f"XXH3-128 {piece.xxh3.hex()}",
                found=found.hex(),
                next_step="write to a bucket only while it is free",
            )
        for use, part in uses:
            filling = self._all.filling(use.parameter)
            if filling.came(part.volume):
                self._finish(filling)

    def _goes_straight(self, use: Use, target: Box, *, whole: bool) -> bool:
        filling = self._all.filling(use.parameter)
        return filling.straight and whole and is_contiguous(target, filling.placed.parameter.shape)

    def _private(self, source: memoryview) -> tuple[memoryview, bytes]:
        """A copy that nobody else can write to, good until the next, and its digest."""
        if len(self._copied) < len(source):
            self._copied = memoryview(bytearray(len(source)))
        hasher = xxhash.xxh3_128()
        for start in range(0, len(source), CHUNK_NBYTES):
            chunk = self._copied[start : min(start + CHUNK_NBYTES, len(source))]
            _move(chunk, source[start : start + CHUNK_NBYTES])
            hasher.update(chunk)
        return self._copied[: len(source)], hasher.digest()

    def _straight(self, filling: Filling, piece: Delivery, target: Box) -> bytes:
        """One range to one range. The digest is of the bytes that become resident: the bucket's are read once only."""
        hasher = xxhash.xxh3_128()
        placed = filling.placed
        first = reach(target, placed.parameter.shape)[0] * itemsize_bytes(placed.parameter.dtype)
        nbytes = len(piece.data)
        self._all.destination.prepare(placed.segment, placed.offset + first, placed.offset + first + nbytes)
        mine = filling.claim(first)
        for start in range(0, nbytes, CHUNK_NBYTES):
            source = piece.data[start : start + CHUNK_NBYTES]
            at = placed.offset + first + start
            room = self._port.lend(placed.segment, at, len(source))
            chunk = self._chunk[: len(source)] if room is None else room.memory
            _move(chunk, source)
            hasher.update(chunk)
            if mine:
                filling.hasher.update(chunk)
            if room is None:
                self._port.write(chunk, placed.segment, at)
        if mine:
            filling.release(nbytes)
        return hasher.digest()

    def _scatter(self, filling: Filling, copy: Copy, piece: Delivery, data: memoryview, part: Box, target: Box) -> None:
        """``part`` of the piece, whose bytes are ``data``, to ``target`` of the parameter."""
        if not filling.straight:
            self._assemble(filling, copy, piece, data, part, target)
            return
        placed = filling.placed
        itemsize = itemsize_bytes(placed.parameter.dtype)
        within = _relative(part, piece.box)
        sources = pieces(within, piece.box.shape, itemsize)
        for source, goal in paired(sources, pieces(target, placed.parameter.shape, itemsize)):
            for number in range(source.count):
                start = source.offset + number * source.pitch
                at = placed.offset + goal.offset + number * goal.pitch
                self._port.write(data[start : start + source.length], placed.segment, at)

    def _assemble(
        self, filling: Filling, copy: Copy, piece: Delivery, data: memoryview, part: Box, target: Box
    ) -> None:
        parameter = filling.placed.parameter
        itemsize = itemsize_bytes(piece.one.dtype)
        with filling.lock:
            if filling.memory is None:
                filling.memory = self._assembled(filling)
        whole = elements_of(filling.memory, itemsize, parameter.source_shape)
        source = elements_of(data, itemsize, piece.box.shape)[slices(_relative(part, piece.box))]
        if copy.transposed:
            source = source.swapaxes(-1, -2)
        whole[slices(target)] = source.reshape(target.shape)

    def _assembled(self, filling: Filling) -> memoryview:
        parameter = filling.placed.parameter
        memory = self._all.pool.take(source_nbytes(parameter))
        itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
        zero(elements_of(memory, itemsize, parameter.source_shape), parameter.zeros)
        return memory

    def _finish(self, filling: Filling) -> None:
        """All of its elements have come."""
        if filling.straight:
            self._all.finished({filling.placed.parameter.name: self._hashed_whole(filling)})
            return
        memory = filling.memory if filling.memory is not None else self._assembled(filling)
        self._all.finished(self._finishing.finish(filling.placed, memory))
        filling.memory = None
        self._all.pool.give(memory)

    def _hashed_whole(self, filling: Filling) -> bytes:
        """Its digest: what has not been hashed in passing is read where it lies."""
        placed = filling.placed
        for start in range(filling.hashed, placed.nbytes, CHUNK_NBYTES):
            count = min(CHUNK_NBYTES, placed.nbytes - start)
            room = self._port.lend(placed.segment, placed.offset + start, count)
            if room is None:
                _read(self._all.segments, placed.segment, self._chunk[:count], placed.offset + start)
            filling.hasher.update(self._chunk[:count] if room is None else room.memory)
        return filling.hasher.digest()

    # What was not pushed

    def keep(self, filling: Filling, base: Base | None, begun: frozenset[str]) -> None:
        """Finish a parameter that nothing, or not all, was pushed to: the rest is as it was in ``base``, where there is
        one. Raises PushMismatch where it can only be pushed whole.
        """
        placed = filling.placed
        parameter = placed.parameter
        missing = [copy for copy in parameter.copies if copy.tensor.name not in begun]
        if base is None or not parameter.copies:
            if missing:
                raise PushMismatch(f"nothing was pushed of {missing[0].tensor.name}", where=parameter.name)
            self._finish(filling)
        elif len(missing) == len(parameter.copies):
            self._keep_whole(filling, base)
        elif isinstance(parameter.transform, Quantize):
            raise PushMismatch(
                f"{parameter.name} is quantized, so it can only be pushed whole",
                expected=", ".join(sorted({copy.tensor.name for copy in parameter.copies})),
                found=f"without {', '.join(sorted({copy.tensor.name for copy in missing}))}",
                next_step="push these too, or none of them",
            )
        elif filling.straight:
            for copy in missing:
                for start, nbytes in _ranges(copy.destination, parameter.shape, itemsize_bytes(parameter.dtype)):
                    self._copy(base, placed.segment, placed.offset + start, nbytes)
            self._all.finished({parameter.name: self._hashed_whole(filling)})
        else:
            self._keep_parts(filling, base, [copy.destination for copy in missing])

    def _keep_whole(self, filling: Filling, base: Base) -> None:
        name = filling.placed.parameter.name
        digests = {}
        for placed in self._all.made_with(name):
            self._copy(base, placed.segment, placed.offset, placed.nbytes)
            digests[placed.parameter.name] = base.rows[placed.parameter.name].digest
        self._all.finished(digests)

    def _keep_parts(self, filling: Filling, base: Base, boxes: Sequence[Box]) -> None:
        """Of one that is converted: what was pushed is converted, what is kept has been."""
        placed = filling.placed
        memory = filling.memory if filling.memory is not None else self._assembled(filling)
        itemsize = itemsize_bytes(placed.parameter.dtype)
        shape = placed.parameter.shape
        final = self._finishing.converted(placed, memory)
        there = elements_of(base.read(placed.segment, placed.offset, placed.nbytes), itemsize, shape)
        whole = elements_of(final, itemsize, shape)
        for box in boxes:
            whole[slices(box)] = there[slices(box)]
            self._all.kept_nbytes += box.volume * itemsize
        self._all.finished(self._finishing.write(placed, final))
        filling.memory = None
        self._all.pool.give(memory)

    def _copy(self, base: Base, segment: int, offset: int, nbytes: int) -> None:
        base.copy(segment, offset, nbytes, self._all.destination, self._port, self._all.segments)
        self._all.kept_nbytes += nbytes


def _relative(part: Box, whole: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(part.start, whole.start, strict=True)), part.shape)


def _ranges(box: Box, shape: Shape, itemsize: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of each unbroken range of the box within a parameter of this shape."""
    return [
        (group.offset + number * group.pitch, group.length)
        for group in pieces(box, shape, itemsize)
        for number in range(group.count)
    ]


def _move(target: memoryview, source: memoryview) -> None:
    """Copy; other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _read(segments: Sequence[int] | None, segment: int, buffer: memoryview, offset: int) -> None:
    if segments is None:
        raise TypeError("what goes straight to its place is a host's")
    done = 0
    while done < len(buffer):
        got = os.preadv(segments[segment], [buffer[done:]], offset + done)
        if not got:
            raise TransferError("a segment became shorter while it was filled", found=offset + done)
        done += got
