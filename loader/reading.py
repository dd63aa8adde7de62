"""Reading: carries out a slab's reads from files into a buffer, and says what will be read next.

Owns which ranges are read together, what a failed or short read is called, and the counts of bytes. How a file's bytes
come here is the :class:`Access`'s that it is given. Thread-safe: each thread brings a buffer of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from weightcached.loader.boxes import Box, Shape, is_contiguous
from weightcached.loader.planned import Copy, LoadPlan, PartKind, PlannedParameter, TensorHeader
from weightcached.loader.slabs import Read, Slab, reads_of
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import CheckpointError, TruncatedFile

BAND_NBYTES = 128 << 10
"""Of so many bytes of rows at a time columns are made: few enough rows that what is written stays in a core's cache."""

ALONE_NBYTES = 64 << 10
"""Ranges of at least this size are read alone; smaller ones together with the gaps between them."""

_GAP_MAX_NBYTES = 512 << 10
"""Over wider gaps even small ranges are read alone."""

VECTORS_MAX = 1024
"""IOV_MAX: the most buffers one system call fills."""

_ZEROS = memoryview(bytes(1 << 20))


class Extent(NamedTuple):
    """Bytes of a file that are read from the first to the last."""

    file: str
    offset: int
    nbytes: int


class Access(Protocol):
    """One way in which bytes of files come into buffers. Thread-safe."""

    def expect(self, file: str, offset: int, nbytes: int) -> None:
        """These bytes will be read soon. Blocks only while the device's queue is full."""
        ...

    def begin(self, extents: Iterator[Extent]) -> None:
        """This thread reads these next, one after the other. Blocks for no more than some MiB."""
        ...

    def fill(self, file: str, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers, at most :data:`VECTORS_MAX`, from ``offset`` of the file, one after the other.

        Raises OSError, or EOFError with the number of bytes that were there when the file ends before.
        """
        ...

    def view(self, file: str, offset: int, nbytes: int) -> memoryview | None:
        """These bytes where they lie in memory already, to be copied from; None where they do not, or nobody may look.

        Good until this object is closed.
        """
        ...


class Reader:
    """Reads slabs by ``access``, which outlives this object."""

    def __init__(self, access: Access) -> None:
        self._access = access
        # Bytes of gaps land here, all in one place that stays in the cache. What is in it is never looked at.
        self._gap = memoryview(bytearray(_GAP_MAX_NBYTES))

    def expect(self, slab: Slab) -> None:
        """The slab will be read soon."""
        for read in slab.reads:
            for offset, nbytes in spans(read):
                self._access.expect(read.tensor.file, offset, nbytes)

    def begin(self, run: Iterable[Slab]) -> None:
        """This thread reads these slabs next, after what it has to do before."""
        self._access.begin(extents(read for slab in run for read in slab.reads))

    def fill(self, slab: Slab, buffer: memoryview) -> int:
        """Fill the first ``slab.source_nbytes`` bytes of ``buffer``. Returns the bytes read, gaps included.

        Blocks. Raises TruncatedFile when a file ends too early and CheckpointError when it cannot be read (the cause is
        the OSError), both naming file and tensor.
        """
        for zeros in slab.zeros:
            for number in range(zeros.count):
                _zero(buffer, zeros.offset + number * zeros.pitch, zeros.length)
        return sum(
            self._read_columns(read, buffer, read.column_itemsize) if read.column_itemsize else self._read(read, buffer)
            for read in slab.reads
        )

    def _read_columns(self, read: Read, buffer: memoryview, itemsize: int) -> int:
        """Read some rows after the other and write each band of them as columns."""
        import numpy as np

        dtype, elements = np.dtype(f"u{itemsize}"), read.length // itemsize
        band_rows = min(read.ranges, max(1, BAND_NBYTES // read.length))
        scratch = bytearray(band_rows * read.length)
        done = 0
        for first in range(0, read.ranges, band_rows):
            count = min(band_rows, read.ranges - first)
            done += self._read(read.band(first, count), memoryview(scratch))
            rows = np.ndarray((count, elements), dtype, scratch)
            target = read.target + first * itemsize
            columns: np.ndarray = np.ndarray((elements, count), dtype, buffer, target, (read.target_pitch, itemsize))
            columns[...] = rows.T
        return done

    def _read(self, read: Read, buffer: memoryview) -> int:
        if read.pitch > read.length and not _is_alone(read):
            view = self._access.view(read.tensor.file, read.offset, read.span_nbytes)
            if view is not None:
                return _copy_ranges(read, view, buffer)
        done = 0
        for offset, buffers in self._vectors(read, buffer):
            wanted = sum(map(len, buffers))
            try:
                self._access.fill(read.tensor.file, buffers, offset)
            except OSError as error:
                raise CheckpointError(
                    f"tensor {read.tensor.name!r} cannot be read",
                    found=error.strerror,
                    where=f"{read.tensor.file}, byte {offset}",
                ) from error
            except EOFError as error:
                raise TruncatedFile(
                    f"the file ends within tensor {read.tensor.name!r}",
                    expected=f"{wanted} bytes from byte {offset}",
                    found=f"{error} bytes",
                    where=read.tensor.file,
                    next_step="it became shorter while it was read: let whoever writes it finish, then start again",
                ) from error
            done += wanted
        return done

    def _vectors(self, read: Read, buffer: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
        """System calls that make up the read: file offset, buffers to fill."""
        length, pitch, count = read.length, read.pitch, read.ranges
        if pitch == length == read.target_pitch:
            yield read.offset, [buffer[read.target : read.target + length * count]]
            return
        targets = [buffer[at : at + length] for at in _offsets(read.target, read.target_pitch, count)]
        if _is_alone(read):
            for offset, target in zip(_offsets(read.offset, pitch, count), targets, strict=True):
                yield offset, [target]
            return
        gap = self._gap[: pitch - length]
        step = VECTORS_MAX // 2 if gap else VECTORS_MAX
        for first in range(0, count, step):
            some = targets[first : first + step]
            vectors = [view for target in some for view in (target, gap)][:-1] if gap else some
            yield read.offset + first * pitch, vectors


def requested_nbytes(plan: LoadPlan) -> dict[PartKind, int]:
    """Bytes of the files that carrying out the plan asks for, by part kind; at most, and known from headers alone.

    Cutting a strided parameter into slabs saves the gap at the end of each.
    """
    requested: dict[PartKind, int] = {}
    for parameter in plan.parameters:
        nbytes = sum([nbytes for _, nbytes in requests(parameter)])
        requested[parameter.part_kind] = requested.get(parameter.part_kind, 0) + nbytes
    return requested


def requests(parameter: PlannedParameter) -> Iterator[tuple[str, int]]:
    """(file, nbytes) that is read for each of the parameter's copies, gaps included."""
    itemsize = itemsize_bytes(parameter.source_dtype or parameter.dtype)
    for copy in parameter.copies:
        tensor = copy.tensor
        if copy.source.shape == tensor.shape:
            yield tensor.file, tensor.nbytes
        else:
            boxes = (copy.source, copy.destination, copy.transposed)
            yield tensor.file, _requested_nbytes(boxes, tensor.shape, parameter.source_shape, itemsize)


@functools.lru_cache(maxsize=1 << 14)  # as many as a layer has tensors, or none would be found again
def _requested_nbytes(boxes: tuple[Box, Box, bool], tensor: Shape, parameter: Shape, itemsize: int) -> int:
    """The same for one copy between tensors of these shapes. Layers repeat them: each is looked at once."""
    if is_contiguous(boxes[0], tensor):
        return boxes[0].volume * itemsize
    copy = Copy(TensorHeader("", "uint8", tensor, "", 0, 0), *boxes)
    return sum(nbytes for read in reads_of(copy, parameter, itemsize) for _, nbytes in spans(read))


def spans(read: Read) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of the file's ranges that are read: one with its gaps, or each range alone."""
    if _is_alone(read) and read.pitch != read.length:
        for offset in _offsets(read.offset, read.pitch, read.ranges):
            yield offset, read.length
    else:
        yield read.offset, read.span_nbytes


def extents(reads: Iterable[Read]) -> Iterator[Extent]:
    """What is read, in order. Ranges that lie together are one, with the gaps between them where those are read."""
    last: Extent | None = None
    for read in reads:
        gap = 0 if _is_alone(read) else read.pitch - read.length
        for offset, nbytes in spans(read):
            if last is not None and last.file == read.tensor.file and 0 <= offset - last.offset - last.nbytes <= gap:
                last = last._replace(nbytes=offset + nbytes - last.offset)
                continue
            if last is not None:
                yield last
            last = Extent(read.tensor.file, offset, nbytes)
    if last is not None:
        yield last


def _is_alone(read: Read) -> bool:
    return read.length >= ALONE_NBYTES or read.pitch - read.length > _GAP_MAX_NBYTES


def _offsets(first: int, pitch: int, count: int) -> range:
    return range(first, first + pitch * count, pitch)


def _copy_ranges(read: Read, source: memoryview, buffer: memoryview) -> int:
    """The read's ranges out of ``source``, its span. Nothing of the gaps is touched, which is most of the cost."""
    import numpy as np

    itemsize = math.gcd(read.length, read.pitch, read.target_pitch, 8)
    shape = (read.ranges, read.length // itemsize)
    dtype = np.dtype(f"u{itemsize}")
    ranges: np.ndarray = np.ndarray(shape, dtype, source, 0, (read.pitch, itemsize))
    target: np.ndarray = np.ndarray(shape, dtype, buffer, read.target, (read.target_pitch, itemsize))
    target[...] = ranges
    return read.ranges * read.length


def _zero(buffer: memoryview, offset: int, nbytes: int) -> None:
    while nbytes > 0:
        some = min(nbytes, len(_ZEROS))
        buffer[offset : offset + some] = _ZEROS[:some]
        offset += some
        nbytes -= some
