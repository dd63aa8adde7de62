"""kvikio without GPUDirect Storage, for tests on machines that have neither: what the loader calls of it, and no more.

A stand-in, as tests/fakecuda is one for the driver, and of use with that alone: its device's addresses are the host's,
so a file's bytes can really be read to where the device has them. It proves our calls, their order and their errors;
not that kvikio behaves so, nor any speed. ``$FAKEKVIKIO`` has words for being worse than the real one: ``unavailable``,
``closed`` (no file can be opened), ``wrong`` (other bytes arrive), ``failing`` (reads fail after the first of each
file).
"""

import ctypes
import enum
import os
from collections.abc import Callable


class CompatMode(enum.Enum):
    OFF = 0
    ON = 1
    AUTO = 2


from kvikio import defaults  # type: ignore[import-not-found]  # noqa: E402 (itself; it takes the modes from here)


def worse(word: str) -> bool:
    return word in os.environ.get("FAKEKVIKIO", "").split()


class IOFuture:
    """Nothing is read before somebody waits: as late as it may be."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def get(self) -> int:
        return self._read()


class CuFile:
    """``read_nbytes``: by all files of this process so far."""

    read_nbytes = 0
    open_files = 0

    def __init__(self, file: str, flags: str = "r") -> None:
        if flags != "r" or worse("closed"):
            raise RuntimeError("cuFile error at: file_handle.cpp: CU_FILE_IO_NOT_SUPPORTED")
        if defaults.get("compat_mode") is not CompatMode.OFF:
            raise RuntimeError("this would be read by POSIX calls")
        self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._reads = 0
        CuFile.open_files += 1

    def close(self) -> None:
        os.close(self._fd)
        CuFile.open_files -= 1

    def __enter__(self) -> "CuFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pread(
        self, buf: object, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> IOFuture:
        array = buf.__cuda_array_interface__  # type: ignore[attr-defined]
        (nbytes,), (address, read_only) = array["shape"], array["data"]
        if array["typestr"] != "|u1" or read_only or (size is not None and size > nbytes):
            raise ValueError("Size is greater than the size of the buffer")
        self._reads += 1
        if worse("failing") and self._reads > 1:
            raise RuntimeError("cuFile error at: file_handle.cpp: GPU page pinning failed")
        return IOFuture(lambda: self._read(address, nbytes if size is None else size, file_offset))

    def _read(self, address: int, nbytes: int, offset: int) -> int:
        memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        got = os.preadv(self._fd, [memory], offset)
        if worse("wrong"):
            memory[0] ^= 1
        CuFile.read_nbytes += got
        return got
