"""A device's primary context, and what works in it: streams, events, copies.

Owns retaining and releasing the context that torch uses too (a second one would cost its own memory), and the checked
calls of whoever fills memory or copies out of it. The keeper never comes here: a context takes hundreds of MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightcached.protocol.errors import DeviceFailed, InsufficientMemory
from weightcached.protocol.memory.cuda import driver, nvml
from weightcached.protocol.memory.cuda.devices import Device
from weightcached.protocol.memory.cuda.owned import Owned, call_within, current_context, within


class Context(Owned):
    """The primary context of ``device``, retained. What was made in it is closed before it is."""

    def __init__(self, device: Device) -> None:
        """Raises InsufficientMemory, naming who holds the device's memory where NVML knows."""
        driver.initialise()
        self.device = device
        asked = f"the context of {device.uuid}"
        number = driver.call("cuDeviceGet", device.ordinal, asked=asked)
        try:
            self.handle = int(driver.call("cuDevicePrimaryCtxRetain", number, asked=asked))
        except InsufficientMemory as error:
            raise nvml.no_room(error, asked=asked, uuid=device.uuid) from error
        self._owns(driver.call, "cuDevicePrimaryCtxRelease", number, asked=asked)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What this thread calls within goes to this context; the one before is current again after it. A failure of
        the device says which device it is.
        """
        where = f"device {self.device.uuid}"
        try:
            with within(self.handle, asked=f"the context of {self.device.uuid} in this thread"):
                yield
        except DeviceFailed as failure:
            failure.where = failure.where or where
            raise

    def synchronize(self) -> None:
        """Wait for all work of the context, and raise what went wrong in it. The context is current."""
        driver.call("cuCtxSynchronize", asked=f"the end of all work on {self.device.uuid}")


class Event(Owned):
    """A point in a stream, to wait for. Made in the current context; without timing, which makes waiting cheap."""

    def __init__(self) -> None:
        flag = driver.bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING
        context = current_context()
        self.handle = int(driver.call("cuEventCreate", int(flag), asked="an event"))
        self._owns(call_within, context, "cuEventDestroy", self.handle, asked="an event's end")

    def record(self, stream: Stream) -> None:
        """The point is after all that ``stream`` has been given so far."""
        driver.call("cuEventRecord", self.handle, stream.handle, asked="an event in a stream")

    def wait(self) -> None:
        """Block until the point is reached, without the interpreter's lock. Raises what failed before it."""
        driver.call("cuEventSynchronize", self.handle, asked="an event")

    def reached(self) -> bool:
        """Whether it is; does not block. Raises what failed before it."""
        return driver.finished("cuEventQuery", self.handle, asked="an event")


class Stream(Owned):
    """Work done in its order, beside other streams. Made in the current context, and independent of the default one.

    Closing it does not wait: work that it was given is still done.
    """

    def __init__(self) -> None:
        flag = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
        context = current_context()
        self.handle = int(driver.call("cuStreamCreate", int(flag), asked="a stream"))
        self._owns(call_within, context, "cuStreamDestroy", self.handle, asked="a stream's end")

    def wait_for(self, event: Event) -> None:
        """What is given to this stream from now on begins after ``event``. Does not block."""
        driver.call("cuStreamWaitEvent", self.handle, event.handle, 0, asked="a stream that waits for an event")

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """From host to device. Only from pinned memory (``staging``) does the program go on meanwhile."""
        asked = f"a copy of {nbytes} bytes from {source:#x} to {address:#x} on the device"
        driver.call("cuMemcpyHtoDAsync", address, source, nbytes, self.handle, asked=asked)

    def copy_out(self, target: int, address: int, nbytes: int) -> None:
        """From device to host, as :meth:`copy_in`."""
        asked = f"a copy of {nbytes} bytes from {address:#x} on the device to {target:#x}"
        driver.call("cuMemcpyDtoHAsync", target, address, nbytes, self.handle, asked=asked)

    def copy_within(self, address: int, source: int, nbytes: int) -> None:
        """From device to device: both addresses are of the current context's device."""
        asked = f"a copy of {nbytes} bytes from {source:#x} to {address:#x}, both on the device"
        driver.call("cuMemcpyDtoDAsync", address, source, nbytes, self.handle, asked=asked)

    def zero(self, address: int, nbytes: int) -> None:
        """Set bytes of the device to zero: fresh memory has whatever was there before."""
        asked = f"{nbytes} zero bytes at {address:#x} on the device"
        driver.call("cuMemsetD8Async", address, 0, nbytes, self.handle, asked=asked)

    def synchronize(self) -> None:
        """Block until all of it is done, without the interpreter's lock. Raises what failed."""
        driver.call("cuStreamSynchronize", self.handle, asked="the end of a stream's work")
