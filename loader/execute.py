"""Execution: carries out a load plan. Threads take slabs in order, read, transform, write and digest them.

Owns the threads and the digests. Borrows the checkpoint's descriptors and the segments, leaves nothing mapped, and
writes only inside the places it is given; what a failed execution has written is of no use. How bytes get into the
segment is the destination's, whether files changed meanwhile is the pipeline's question.

A thread takes a run of slabs at a time: long enough that a disk sees a few streams, short enough that threads end
together. Digesting goes by turns (``turns.py``), for which hardly anybody waits.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from weightcached.loader.access import accessing, look
from weightcached.loader.bench import bench_of
from weightcached.loader.destination import Destination, Output, Port, Room, Straight, Target, as_destination
from weightcached.loader.held import Held, staggered
from weightcached.loader.layout import Placed, Placement
from weightcached.loader.planned import PartKind, PlannedParameter
from weightcached.loader.quantize import Transforms, measure
from weightcached.loader.reading import Reader
from weightcached.loader.slabs import Slab, slabs
from weightcached.loader.straight import Offered
from weightcached.loader.strategy import Strategy, choose
from weightcached.loader.turns import Digests
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import InsufficientMemory
from weightcached.protocol.memory.admission import rooms
from weightcached.protocol.worker_messages import LoadStrategy

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.1

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all, at most every tenth of a second, by one thread at a time. What it raises ends the
execution."""


@dataclass(slots=True)
class Traffic:
    """Bytes, by part kind. ``kept`` counts the checkpoint's bytes that became part of a parameter, before transforms.

    ``read`` is what system calls returned; what the device delivered is the kernel's business, and never more than
    that plus rounding to pages.
    """

    read: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Executed:
    """What an execution leaves besides the segments' bytes."""

    digests: Mapping[str, bytes]
    """Parameter name → XXH3-128 of its resident bytes; aliases have their target's."""
    traffic: Mapping[PartKind, Traffic]


def execute(
    placement: Placement,
    files: Mapping[str, int],
    segments: Target,
    *,
    strategy: LoadStrategy = "auto",
    threads: int | None = None,
    slab_nbytes: int | None = None,
    progress: Progress | None = None,
    expendable: bool = False,
) -> Executed:
    """Fill every parameter of ``placement`` in ``segments`` from ``files`` (name → descriptor).

    A destination is left here.

    ``expendable``: a file that becomes shorter meanwhile may kill this process; where ranges are strided, it is faster.
    ``threads``, ``slab_nbytes``: by default, as the strategy needs them. Padding is written as zeros, whatever was
    there. Blocks until all is written; on failure until every thread has stopped. Raises TruncatedFile or
    CheckpointError (unreadable, or not finite where it must be) naming file and tensor, DeploymentError when the files
    cannot be read as ``strategy`` says, InsufficientMemory when the segment cannot grow, and what ``progress`` and the
    destination raise.
    """
    parameters = [placed.parameter for placed in placement.placed]
    free_nbytes = min(room.free_nbytes for room in rooms())
    destination = as_destination(segments, placement.segments_nbytes)
    with destination, Offered(lambda: destination.straight(files)) as offered:
        chosen = choose(
            parameters,
            look(files),
            free_nbytes=free_nbytes,
            asked=strategy,
            resident_on_host=destination.on_host,
            straight=None if destination.on_host else offered.why_not,
        )
        log.info("load strategy: %s", chosen.reason)
        straight = offered.required() if chosen.name == "gds" else None
        with accessing(files, chosen, mapped=expendable) as access:
            team = _Team(placement, Reader(access), destination, slab_nbytes or chosen.slab_nbytes, chosen, progress)
            team.run(threads or chosen.threads, straight)
    log.info("%s", destination)
    return team.executed()


class _Team:
    """The threads' shared state, which ``_lock`` guards."""

    def __init__(
        self,
        placement: Placement,
        reader: Reader,
        destination: Destination,
        slab_nbytes: int,
        strategy: Strategy,
        progress: Progress | None,
    ) -> None:
        self._placed: dict[str, Placed] = {placed.parameter.name: placed for placed in placement.placed}
        self._reader = reader
        self._destination = destination
        self._slab_nbytes = slab_nbytes
        self._ahead_nbytes = strategy.ahead_nbytes
        self._run_nbytes = strategy.run_nbytes
        self._pending: Iterator[Slab] = staggered(
            itertools.chain.from_iterable(
                slabs(placed.parameter, slab_nbytes=slab_nbytes) for placed in placement.placed
            )
        )
        self._lock = threading.Lock()
        self._expected: deque[Slab] = deque()
        self._expected_nbytes = 0
        self._left_nbytes = sum(_source_nbytes(placed.parameter) for placed in placement.placed)
        self._threads = 1
        self._digests = Digests(name for name, placed in self._placed.items() if placed.parameter.alias_of is None)
        self._traffic: dict[PartKind, Traffic] = {}
        self._failure: BaseException | None = None
        self._straight: Straight | None = None
        self._held = Held(placed.parameter for placed in placement.placed)
        self._meter = _Meter(placement, progress)

    def run(self, threads: int, straight: Straight | None = None) -> None:
        """Work with so many threads to the end; what ``straight`` takes it reads. Raises the first failure, when all of
        them have stopped.
        """
        self._straight = straight
        self._threads = threads
        team = [threading.Thread(target=self._work, name=f"weightcached-load-{n}") for n in range(threads)]
        started = []
        try:
            for thread in team:
                thread.start()
                started.append(thread)
            for thread in started:
                thread.join()
        except BaseException as interruption:
            self._fail(interruption)
            for thread in started:
                thread.join()
            if isinstance(interruption, RuntimeError):  # what Python says when the system gives it no thread
                raise InsufficientMemory("cannot start a thread to load with", found=interruption) from interruption
            raise
        if self._failure is not None:
            raise self._failure
        self._destination.finish()

    def executed(self) -> Executed:
        digests = {name: self._digests.of(placed.parameter.alias_of or name) for name, placed in self._placed.items()}
        return Executed(digests, self._traffic)

    def _work(self) -> None:
        try:
            with self._destination.port(self._slab_nbytes) as port:
                self._work_through(port)
        except BaseException as failure:  # noqa: BLE001 - raised again by `run`, in the thread that waits for us
            self._fail(failure)

    def _work_through(self, port: Port) -> None:
        transforms = Transforms(bench_of(port, self._spot))
        buffer = memoryview(b"")
        if self._straight is not None and port.on_device is not None:
            port.on_device.stream.synchronize()  # what zeroes the segments comes before what is read past the stream
        while run := self._claim():
            self._reader.begin(run)
            for slab in run:
                if self._failure is not None:
                    return
                self._destination.prepare(self._segment_of(slab), *self._place_of(slab))
                if slab.step != "all":
                    self._process_held(slab, port, transforms)
                    continue
                if (room := self._room(slab, port)) is not None:
                    offset = slab.first * itemsize_bytes(slab.parameter.dtype)
                    self._finish(slab, (Output(slab.parameter.name, offset, room.memory, room),), port)
                    continue
                if len(buffer) < slab.source_nbytes:
                    buffer = port.buffer(max(slab.source_nbytes, self._slab_nbytes))
                source = buffer[: slab.source_nbytes]
                self._count(slab, self._reader.fill(slab, source))
                self._finish(slab, transforms.outputs(slab, source), port)

    def _room(self, slab: Slab, port: Port) -> Room | None:
        """What stays as it is, read into a room of the destination's; None where it has none."""
        if slab.parameter.transform is not None:
            return None
        spot = self._spot(slab.parameter.name, slab.first * itemsize_bytes(slab.parameter.dtype))
        if port.on_device is not None and self._straight is not None and self._straight.takes(slab):
            address = port.on_device.place(*spot, slab.source_nbytes)
            self._count(slab, self._straight.fill(slab, address))
            return port.on_device.fetch(*spot, slab.source_nbytes)
        room = port.lend(*spot, slab.source_nbytes)
        if room is not None:
            self._count(slab, self._reader.fill(slab, room.memory))
        return room

    def _spot(self, name: str, offset: int) -> tuple[int, int]:
        """Where a byte of the parameter is: in which segment, and where there."""
        placed = self._placed[name]
        return placed.segment, placed.offset + offset

    def _process_held(self, slab: Slab, port: Port, transforms: Transforms) -> None:
        memory = self._held.memory(slab)
        if slab.step == "measure":
            self._count(slab, self._reader.fill(slab, memory))
            self._held.measured(slab, measure(slab, memory))
            return
        outputs = transforms.outputs(slab, memory, largest=self._held.largest(slab))
        self._held.finished(slab)
        self._finish(slab, outputs, port)

    def _finish(self, slab: Slab, outputs: tuple[Output, ...], port: Port) -> None:
        for output in outputs:
            if output.room is not None:
                output.room.filled()
            else:
                port.write(output.data, *self._spot(output.name, output.offset))
        self._digests.digest(slab, outputs, lasting=outputs[0].room is not None)
        self._meter.add(sum(len(output.data) for output in outputs))

    def _count(self, slab: Slab, read_nbytes: int) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(slab.parameter.part_kind, Traffic())
            traffic.read += read_nbytes
            traffic.kept += sum(read.nbytes for read in slab.reads)

    def _claim(self) -> list[Slab]:
        """The next run of slabs; none if there is no more to do. Tells the kernel of those that will follow it.

        What may have to wait for other slabs is a run by itself, so that these cannot be in one that waits for it: held
        matrices, and, where the destination lends no room, everything.
        """
        fresh = []
        with self._lock:
            if self._failure is not None:
                return []
            while self._expected_nbytes < self._ahead_nbytes + self._run_nbytes:
                slab = next(self._pending, None)
                if slab is None:
                    break
                self._expected.append(slab)
                self._expected_nbytes += slab.source_nbytes
                fresh.append(slab)
            run = self._next_run()
            self._expected_nbytes -= sum(slab.source_nbytes for slab in run)
            self._left_nbytes -= _read_nbytes(run)
        for slab in fresh:
            if self._straight is None or not self._straight.takes(slab):
                self._reader.expect(slab)
        return run

    def _next_run(self) -> list[Slab]:
        """Taken from those that are expected, all of one segment, and no more than a thread's share of what is left, or
        threads would not end together. Called with the lock held.
        """
        run: list[Slab] = []
        nbytes = 0
        most = min(self._run_nbytes, self._left_nbytes // self._threads)
        while self._expected:
            slab = self._expected[0]
            alone = slab.step != "all" or not self._destination.lends
            nbytes += slab.source_nbytes
            if run and (alone or nbytes > most or self._segment_of(slab) != self._segment_of(run[0])):
                break
            run.append(self._expected.popleft())
            if alone:
                break
        return run

    def _segment_of(self, slab: Slab) -> int:
        return self._placed[slab.parameter.name].segment

    def _place_of(self, slab: Slab) -> tuple[int, int]:
        """Where in its segment it will be: first byte, and one past its last."""
        placed = self._placed[slab.parameter.name]
        elements = math.prod(slab.parameter.source_shape)
        first = placed.offset + slab.first * placed.nbytes // elements
        return first, first + slab.elements * placed.nbytes // elements

    def _fail(self, failure: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = failure
        self._digests.abandon()
        self._held.abandon()
        self._destination.abandon()


def _read_nbytes(run: Iterable[Slab]) -> int:
    """What they come from: slabs that come a second time have nothing to read."""
    return sum(slab.source_nbytes for slab in run if slab.step != "quantize")


def _source_nbytes(parameter: PlannedParameter) -> int:
    """The same of all its slabs."""
    if parameter.alias_of is not None or parameter.produced_by is not None:
        return 0
    return math.prod(parameter.source_shape) * itemsize_bytes(parameter.source_dtype or parameter.dtype)


class _Meter:
    """Counts bytes written and reports them now and then."""

    def __init__(self, placement: Placement, progress: Progress | None) -> None:
        self._progress = progress
        self._total = sum(placed.nbytes for placed in placement.placed if placed.parameter.alias_of is None)
        self._done = 0
        self._next_report_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now_s = time.monotonic()
            if self._progress is None or (now_s < self._next_report_s and self._done < self._total):
                return
            self._next_report_s = now_s + PROGRESS_EVERY_S
            self._progress(self._done, self._total)
