"""Memory kind ``cuda-vmm``: a segment is physical memory of one GPU, handed over as a POSIX descriptor.

Owns how the driver's parts (``cuda/``) make a kind: the keeper allocates and exports without a context, the worker maps
to write and copies, engines map read-only. The memory lives while any descriptor, handle or mapping of it does.

There are no seals. What protects a published segment is that engines map it read-only, and that whoever could write,
the worker, has ended before it is published. A process that is handed the descriptor can map it to write, if it wants
to: like any process of the daemon's uid, it is trusted.
"""

from __future__ import annotations

import fcntl
import functools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weightcached.protocol.errors import DeviceFailed, SwapFailed, SwapRefused, TransferError, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.admission import Room
from weightcached.protocol.memory.cuda import driver, mappings, physical
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.giving_up import ClosedAfterwards, give_up
from weightcached.protocol.memory.on_device import DeviceBytes, OnDevice, as_array

_SAID_OF_DESCRIPTORS = frozenset({"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE"})


class CudaVmm(OnDevice):
    """The kind on one GPU: see :class:`OnDevice`."""

    dies_with_holder = False

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self._refused: list[physical.Allocation] = []

    @functools.cached_property
    def page_nbytes(self) -> int:
        return physical.granularity(self.device)

    def admit(self, nbytes: int) -> Room:
        """As ever, once what the driver would not take back was offered again."""
        for allocation in tuple(self._refused):
            with suppress(WeightCacheError):
                allocation.close()
                self._refused.remove(allocation)
        return super().admit(nbytes)

    def allocate(self, nbytes: int, *, name: str) -> int:
        """New memory, taken at once; whatever was there before is still there. Device memory has no name."""
        with OwnedFds() as fds:
            with self._for_a_moment(physical.allocate(self.resident_nbytes(nbytes), device=self.device)) as allocation:
                fds.append(allocation.export())
            return fds.take(0)

    def seal(self, fd: int) -> None:
        """Nothing to be done: see above."""

    def export(self, fd: int) -> int:
        """Another descriptor of the same: opened anew, through /proc, it would not be this memory any more."""
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def verify(self, fd: int, *, nbytes: int, what: str, read_only: bool = False) -> None:
        """Refuse what the driver does not know as memory of this device. Its size shows when it is mapped: the driver
        does not tell it, and maps no more than there is.
        """
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise TransferError(f"{what} is not memory", expected=f"memory of GPU {self.uuid}", found="a socket")
        with self._for_a_moment(self._imported(fd, nbytes=nbytes, what=what)) as allocation:
            asked = f"the properties of {what}"
            found = driver.call("cuMemGetAllocationPropertiesFromHandle", allocation.handle, asked=asked)
        if found.location.id != self.device.ordinal:
            raise TransferError(
                f"{what} is memory of another device",
                expected=f"device {self.device.ordinal} ({self.uuid})",
                found=f"device {found.location.id}",
            )

    def map_readonly(self, fd: int, *, nbytes: int) -> DeviceMapping:
        """Map for a reader. A kernel or copy that writes there fails, and takes its process's context with it."""
        return self._mapped(fd, nbytes=nbytes, writable=False)

    map_private = map_readonly
    """There is no copy-on-write: an engine that writes needs a copy."""

    def map_shared(self, fd: int, *, nbytes: int) -> DeviceMapping:
        """Map for the worker that fills the segment."""
        return self._mapped(fd, nbytes=nbytes, writable=True)

    @contextmanager
    def _for_a_moment(self, allocation: physical.Allocation) -> Iterator[physical.Allocation]:
        """A handle that is released after the block. One that the driver refuses keeps the memory, whoever else lets go
        of it: the error says so, and :meth:`admit` tries again.
        """
        try:
            with allocation:
                yield allocation
        finally:
            if not allocation.closed:
                self._refused.append(allocation)

    def _mapped(self, fd: int, *, nbytes: int, writable: bool) -> DeviceMapping:
        granularity = self.page_nbytes
        allocation = self._imported(fd, nbytes=nbytes, what="a segment")
        try:
            return DeviceMapping(allocation, nbytes=nbytes, granularity=granularity, writable=writable)
        except BaseException as error:
            give_up(allocation)
            if isinstance(error, DeviceFailed):
                raise _of_descriptor(error, f"a segment is not {nbytes} bytes of GPU {self.uuid}") from error
            raise

    def _imported(self, fd: int, *, nbytes: int, what: str) -> physical.Allocation:
        device, resident_nbytes = self.device, self.resident_nbytes(nbytes)
        try:
            return physical.from_descriptor(fd, nbytes=resident_nbytes, device=device)
        except DeviceFailed as error:
            raise _of_descriptor(error, f"{what} is not memory of GPU {self.uuid}") from error


@functools.cache
def kind_on(uuid: str) -> CudaVmm:
    """The kind on this GPU: one object for a process, which remembers what the driver said."""
    return CudaVmm(uuid)


class DeviceMapping(ClosedAfterwards):
    """A segment in this process's device addresses, and the handle of its memory.

    :meth:`unmap` and :meth:`remap` (an engine's sleep and wake) leave the addresses as they are, so that tensors and
    captured graphs stay valid. Meanwhile the handle keeps the memory.
    """

    def __init__(self, allocation: physical.Allocation, *, nbytes: int, granularity: int, writable: bool) -> None:
        """Takes ``allocation`` over, if this returns."""
        self.nbytes = nbytes
        self.resident_nbytes = allocation.nbytes
        self.device = allocation.device
        self._allocation = allocation
        self._writable = writable
        self._addresses = mappings.Mapping(allocation.nbytes, alignment=granularity, device=allocation.device)
        try:
            self._addresses.map(allocation, writable=writable)
        except BaseException:
            give_up(self._addresses)
            raise
        self.address = self._addresses.address

    @property
    def closed(self) -> bool:
        return self._addresses.closed

    @property
    def mapped(self) -> bool:
        return self._addresses.mapped and not self.closed

    def close(self) -> None:
        """Unmap now, and give the addresses back. Whatever computes there must have ended. Safe to call twice."""
        self._addresses.close()
        self._allocation.close()

    def unmap(self) -> None:
        """Keep the addresses, but nothing there: who touches them faults. Safe to call twice."""
        self._addresses.unmap()

    def remap(self) -> None:
        """Map the same memory at the same addresses again. Safe to call twice. ValueError once closed."""
        if not self.mapped:
            self._addresses.map(self._allocation, writable=self._writable)

    def exchange(self, other: DeviceMapping) -> None:
        """Map the memory of ``other`` at this address, and keep for ``other`` what was mapped here, unmapped; one that
        is unmapped itself stays so. All work with the memory must have ended (:meth:`settle`).

        SwapRefused for another size. SwapFailed where the driver refuses: this is then mapped as it was, unless it is
        not ``intact``; ``other`` may be unmapped.
        """
        if self.closed or other.closed:
            raise ValueError("the mapping was closed")
        if self.nbytes != other.nbytes:
            raise SwapRefused("segments of other sizes", expected=f"{self.nbytes} bytes", found=f"{other.nbytes} bytes")
        mapped = self.mapped
        try:
            other._addresses.unmap()  # first: after the last step that can fail, all of it is done
            if mapped:
                self._addresses.unmap()
                self._addresses.map(other._allocation, writable=self._writable)
        except WeightCacheError as failure:
            raise self._put_back(failure, mapped=mapped) from failure
        self._allocation, other._allocation = other._allocation, self._allocation

    def _put_back(self, failure: WeightCacheError, *, mapped: bool) -> SwapFailed:
        """The error of an exchange that failed, once its own memory is mapped here again."""
        try:
            if mapped:
                self.remap()
        except WeightCacheError as error:
            return SwapFailed(
                "a segment was unmapped, and neither the new one nor itself could be mapped at its address",
                expected=f"{self.nbytes} bytes at {self.address:#x} on {self.device.uuid}",
                found=f"{failure}, then {error}",
                next_step="the weights in use are not mapped: remap() tries again; else end this process",
                intact=False,
            )
        return SwapFailed(
            "the new segment cannot be mapped in; the weights in use are what they were",
            expected=failure.expected,
            found=f"{failure.message}: {failure.found}",
            next_step=failure.next_step,
        )

    def written(self) -> list[tuple[int, int]]:
        """None: what is mapped read-only was not written to."""
        return []

    def settle(self) -> None:
        """Block until all work of this process's primary context on the device has ended. Raises what failed in it."""
        with Context(self.device) as context, context.current():
            context.synchronize()

    def view(self) -> DeviceBytes:
        """Its bytes, copied to the host piece by piece as they are asked for."""
        if not self.mapped:
            raise ValueError("the mapping was closed, or is unmapped")
        return DeviceBytes(self)

    def revert(self) -> None:
        """Nothing to give up: what is mapped read-only was not written to."""

    def populate(self) -> None:
        """Nothing to do: the driver maps all of it at once."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """One array of bytes."""
        if not self.mapped:
            raise ValueError("the mapping was closed, or is unmapped")
        return as_array(self)


def _of_descriptor(error: DeviceFailed, message: str) -> WeightCacheError:
    """TransferError where the driver said that the descriptor is not what it should be. Its other troubles stay what
    they are: whoever cannot reach his device for a moment must not take weights for broken that are whole.
    """
    if error.found in _SAID_OF_DESCRIPTORS:
        return TransferError(message, expected=error.expected, found=f"{error.message}: {error.found}")
    return error
