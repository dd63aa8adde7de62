"""GPUDirect Storage by way of kvikio: bytes of files straight into a device's memory, past the host's.

Owns asking kvikio whether it can, trying it once on the very files, reading, and what its failures are called. kvikio
is imported when somebody asks, and told not to read by other means behind our back (its compatibility mode). What has
to be computed, padded or put together out of strides, and what is small, is not for it: that is read as ever. Written
against kvikio's documentation (25.02 and later), and never run with it yet.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from weightcached.loader.computing import DeviceArray
from weightcached.loader.slabs import Read, Slab
from weightcached.protocol.errors import DeploymentError, TruncatedFile, WeightCacheError
from weightcached.protocol.memory.cuda.context import Context, Stream
from weightcached.protocol.memory.cuda.legacy import DeviceMemory
from weightcached.protocol.memory.on_device import address_of

LEAST_NBYTES = 64 << 10
"""Of a slab. Smaller reads cost a round trip each, and gain nothing."""

_TRIED_NBYTES = 64 << 10


class Gds:
    """Files that kvikio has open. Thread-safe: each read is its own."""

    def __init__(self, files: Mapping[str, int]) -> None:
        """``files``: name → descriptor, which stay the caller's. Raises whatever kvikio raises."""
        self._held = ExitStack()
        try:
            kvikio: Any = importlib.import_module("kvikio")
            defaults: Any = importlib.import_module("kvikio.defaults")
            self._held.enter_context(defaults.set("compat_mode", kvikio.CompatMode.OFF))
            self._files = {
                name: self._held.enter_context(kvikio.CuFile(f"/proc/self/fd/{fd}", "r")) for name, fd in files.items()
            }
        except BaseException:
            self._held.close()
            raise

    def takes(self, slab: Slab) -> bool:
        """Whether the slab is nothing but ranges of files, one after the other."""
        if slab.step != "all" or slab.parameter.transform is not None or slab.zeros:
            return False
        return slab.source_nbytes >= LEAST_NBYTES and all(map(_is_straight, slab.reads))

    def fill(self, slab: Slab, address: int) -> int:
        """Fill ``slab.source_nbytes`` at ``address`` of the device. Returns the bytes read. Blocks.

        Raises DeploymentError, or TruncatedFile when a file ends too early, naming file and tensor.
        """
        for read in slab.reads:
            tensor, nbytes = read.tensor, read.nbytes
            try:
                got = self.read(tensor.file, read.offset, address + read.target, nbytes)
            except Exception as failure:
                raise DeploymentError(
                    f"GPUDirect Storage cannot read tensor {tensor.name!r}",
                    expected=f"{nbytes} bytes from byte {read.offset}",
                    found=f"{type(failure).__name__}: {failure}",
                    where=tensor.file,
                    next_step="see cufile.log; load with another --load-strategy (read, direct)",
                ) from failure
            if got != nbytes:
                raise TruncatedFile(
                    f"the file ends within tensor {tensor.name!r}",
                    expected=f"{nbytes} bytes from byte {read.offset}",
                    found=f"{got} bytes",
                    where=tensor.file,
                    next_step="it became shorter while it was read: let whoever writes it finish, then start again",
                )
        return slab.source_nbytes

    def read(self, file: str, offset: int, address: int, nbytes: int) -> int:
        """Bytes that were read; fewer at the file's end. Raises whatever kvikio raises."""
        got: int = self._files[file].pread(DeviceArray(address, nbytes), size=nbytes, file_offset=offset).get()
        return got

    def close(self) -> None:
        """Close what is open, and leave kvikio as it was. No thread may read any more. Safe to call twice."""
        self._held.close()


def probed(files: Mapping[str, int], context: Context) -> tuple[Gds | None, str]:
    """A way to read ``files`` that has worked once, right now, into the context's device; or None, and why not."""
    try:
        driver: Any = importlib.import_module("kvikio.cufile_driver")
    except ImportError as error:
        return None, f"kvikio cannot be imported ({error})"
    gds: Gds | None = None
    try:
        if not driver.get("is_gds_available"):
            return None, "kvikio says that GPUDirect Storage is not available (its driver nvidia-fs, or cuFile)"
        gds = Gds(files)
        trouble = _tried(gds, files, context)
    except WeightCacheError:
        if gds is not None:
            gds.close()
        raise
    except Exception as failure:  # noqa: BLE001 - whatever kvikio and what is below it raise, it does not work
        trouble = f"{type(failure).__name__}: {failure}"
    if trouble is None:
        return gds, "GPUDirect Storage has read these files' first bytes right"
    if gds is not None:
        gds.close()
    return None, f"GPUDirect Storage was tried and does not work: {trouble}"


def _tried(gds: Gds, files: Mapping[str, int], context: Context) -> str | None:
    """What is wrong with how the first bytes of each file arrive on the device; None: nothing."""
    with context.current(), DeviceMemory(_TRIED_NBYTES, device=context.device) as memory, Stream() as stream:
        for name, fd in files.items():
            if not (wanted := os.pread(fd, _TRIED_NBYTES, 0)):
                continue
            stream.zero(memory.address, _TRIED_NBYTES)
            stream.synchronize()
            got = gds.read(name, 0, memory.address, len(wanted))
            found = memoryview(bytearray(len(wanted)))
            stream.copy_out(address_of(found), memory.address, len(wanted))
            stream.synchronize()
            if got != len(wanted) or found != wanted:
                return f"of {name}, {got} of {len(wanted)} bytes came, and they are not the file's"
    return None


def _is_straight(read: Read) -> bool:
    return read.column_itemsize is None and (read.ranges == 1 or read.pitch == read.length == read.target_pitch)
