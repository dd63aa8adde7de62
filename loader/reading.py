"""Reading: carries out a slab's reads from open files into a buffer, and tells the kernel what will be read next.

Owns how ranges become system calls, what a failed or short read is called, and the counts of bytes. Opens nothing:
the checkpoint's descriptors are borrowed. Thread-safe: each thread brings a buffer of its own.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Container, Iterator, Mapping, Sequence

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

_VECTORS_MAX = 1024
"""IOV_MAX: the most buffers one system call fills."""

_NO_ADVICE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE})

_ZEROS = memoryview(bytes(1 << 20))


class Reader:
    """Reads slabs from ``files``, a mapping from file name to descriptor that outlives this object."""

    def __init__(self, files: Mapping[str, int], exact: Container[str] = ()) -> None:
        """``exact`` names the files of which nothing may be read ahead but what :meth:`expect` is told of."""
        self._files = files
        self._exact = exact
        # Bytes of gaps land here, all in one place that stays in the cache. What is in it is never looked at.
        self._gap = memoryview(bytearray(_GAP_MAX_NBYTES))
        for name, fd in files.items():
            _advise(fd, 0, 0, os.POSIX_FADV_RANDOM if name in exact else os.POSIX_FADV_SEQUENTIAL)

    def expect(self, slab: Slab) -> None:
        """The slab will be read soon. Fills the page cache with its ranges of exact files, unless they are there.

        Blocks only while the device's queue is full.
        """
        for read in slab.reads:
            fd = self._files[read.tensor.file]
            if read.tensor.file not in self._exact or _is_cached(fd, read.offset + read.span_nbytes - 1):
                continue
            for offset, nbytes in spans(read):
                _advise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

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
        fd = self._files[read.tensor.file]
        done = 0
        for offset, buffers in self._vectors(read, buffer):
            wanted = sum(map(len, buffers))
            try:
                _read_exactly(fd, buffers, offset, wanted)
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
        step = _VECTORS_MAX // 2 if gap else _VECTORS_MAX
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


@functools.lru_cache(maxsize=1024)
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


def _is_alone(read: Read) -> bool:
    return read.length >= ALONE_NBYTES or read.pitch - read.length > _GAP_MAX_NBYTES


def _offsets(first: int, pitch: int, count: int) -> range:
    return range(first, first + pitch * count, pitch)


def _read_exactly(fd: int, buffers: Sequence[memoryview], offset: int, wanted: int) -> None:
    """Fill all buffers from ``offset``. EOFError with the bytes that were there when the file ends before."""
    done = os.preadv(fd, buffers, offset)
    while done < wanted:
        more = os.preadv(fd, list(_unfilled(buffers, done))[:_VECTORS_MAX], offset + done)
        if not more:
            raise EOFError(done)
        done += more


def _unfilled(buffers: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if done < len(buffer):
            yield buffer[done:]
        done = max(0, done - len(buffer))


def _zero(buffer: memoryview, offset: int, nbytes: int) -> None:
    while nbytes > 0:
        some = min(nbytes, len(_ZEROS))
        buffer[offset : offset + some] = _ZEROS[:some]
        offset += some
        nbytes -= some


def _is_cached(fd: int, offset: int) -> bool:
    """Whether the byte can be read without waiting. False where the file system cannot tell."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # not there (EAGAIN), or not to be told (EOPNOTSUPP); a real fault shows when the slab is read
        return False


def _advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    """Advice is a wish: a file system that does not take it is read without."""
    try:
        os.posix_fadvise(fd, offset, nbytes, advice)
    except OSError as error:
        if error.errno not in _NO_ADVICE:
            raise
