"""The generation that is served while another is pushed: its table, and for partial pushes its bytes.

Owns read-only mappings of its segments until closed. What a push keeps is taken from here, place by place: both
generations have the same layout, which is checked before anything is allocated.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from weightcached.loader.destination import Destination, Port
from weightcached.loader.layout import Placement
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import PushMismatch
from weightcached.protocol.manifest import Manifest, Row, contiguous_stride
from weightcached.protocol.memory import host
from weightcached.protocol.memory.giving_up import ClosedAfterwards
from weightcached.protocol.memory.kinds import SegmentMapping, kind_of

_PIECE_NBYTES = 8 << 20
_NO_COPY_HERE = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class Base(ClosedAfterwards):
    """Until it is closed. ``segments`` are readable descriptors that outlive this; none where nothing is kept."""

    def __init__(self, manifest: Manifest, config: CacheConfig, segments: Sequence[int]) -> None:
        self.rows: dict[str, Row] = {row.name: row for row in manifest}
        self._meta = manifest.meta
        self._fds = list(segments)
        self._kind = kind_of(config)
        self._copies_in_kernel = self._kind is host
        self._lock = threading.Lock()
        self._mappings: dict[int, SegmentMapping] = {}

    @property
    def version(self) -> str:
        """Whose stand-in for a digest never changes: ``receipts_version``."""
        return self._meta.receipts_version

    def require_same_layout(self, placement: Placement, config: CacheConfig, *, model_dir: str) -> None:
        """Raises PushMismatch unless the headers' plan puts everything where it lies now: engines change over from one
        to the other without their addresses changing.
        """
        if self._meta.fingerprint != config.fingerprint:
            raise _other_layout("config", self._meta.fingerprint, config.fingerprint, model_dir)
        if self._meta.segments_nbytes != placement.segments_nbytes:
            raise _other_layout("size", self._meta.segments_nbytes, placement.segments_nbytes, model_dir)
        if len(self.rows) != len(placement.placed):
            raise _other_layout("number of parameters", len(self.rows), len(placement.placed), model_dir)
        for placed in placement.placed:
            one, row = placed.parameter, self.rows.get(placed.parameter.name)
            form = (one.dtype, one.shape, contiguous_stride(one.shape), one.alias_of)
            planned = (placed.segment, placed.offset, placed.nbytes, *form)
            there = row and (row.segment, row.offset, row.nbytes, row.dtype, row.shape, row.stride, row.alias_of)
            if there != planned:
                raise _other_layout(f"place of {one.name}", there, planned, model_dir)

    def read(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a segment of its."""
        with self._lock:
            mapping = self._mappings.get(segment)
            if mapping is None:  # not before somebody wants it: a device's is mapped while its context is current
                mapping = self._kind.map_readonly(self._fds[segment], nbytes=self._meta.segments_nbytes[segment])
                self._mappings[segment] = mapping
            return mapping.view()[offset : offset + nbytes]

    def copy(
        self, segment: int, offset: int, nbytes: int, destination: Destination, port: Port, fds: Sequence[int] | None
    ) -> None:
        """The same bytes to the same place of what ``destination`` fills; ``fds`` are its segments' where these are a
        host's.
        """
        for start in range(offset, offset + nbytes, _PIECE_NBYTES):
            count = min(_PIECE_NBYTES, offset + nbytes - start)
            destination.prepare(segment, start, start + count)
            if not self._copied_in_kernel(segment, start, count, fds):
                port.write(self.read(segment, start, count), segment, start)

    def _copied_in_kernel(self, segment: int, start: int, count: int, fds: Sequence[int] | None) -> bool:
        """From memory to memory without a page table in between, where the kernel has that."""
        if fds is None or not self._copies_in_kernel:
            return False
        try:
            done = 0
            while done < count:
                done += os.copy_file_range(self._fds[segment], fds[segment], count - done, start + done, start + done)
        except OSError as error:
            if error.errno not in _NO_COPY_HERE:
                raise
            self._copies_in_kernel = False
            return False
        return True

    def close(self) -> None:
        """Unmap. No view may be left."""
        for mapping in self._mappings.values():
            mapping.close()


def _other_layout(what: str, served: object, planned: object, model_dir: str) -> PushMismatch:
    return PushMismatch(
        f"the headers of the checkpoint do not describe what is served: another {what}",
        expected=served,
        found=planned,
        where=model_dir,
        next_step="put the checkpoint that the daemon loaded back in its place; only its headers are read",
    )
