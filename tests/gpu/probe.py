"""Does a descriptor alone keep a GPU's memory? The first thing to run on any GPU: `python tests/gpu/probe.py`.

Everything rests on it. A makes memory, fills it and sends a descriptor of it to B, which never touches CUDA. A is
killed: NVML's used memory must still hold the memory. C imports it read-only: it must find the bytes, and a write
through its mapping must fail. B lets go: the memory must come back. Where one of these fails, the daemon needs a
process that holds the memory instead. Needs cuda-bindings alone; prints PASS or FAIL, and exits 1 on any FAIL.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

NBYTES = int(os.environ.get("PROBE_NBYTES", 256 << 20))  # a multiple of 2 MiB
SETTLING_S = float(os.environ.get("PROBE_SETTLING_S", "10"))
PATTERN = (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]
WRITES = ("cuMemcpyHtoD", "cuMemsetD8")


def call(name: str, *arguments):
    from cuda.bindings import driver

    result, *values = getattr(driver, name)(*arguments)
    if result != 0:
        raise SystemExit(f"{name}: {result!r}")
    return values[0] if values else None


def mapped(fd: int | None) -> tuple:
    """New memory that may be written, or that behind ``fd`` read-only: its handle, address, and type of descriptor."""
    from cuda.bindings import driver as cuda

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    posix = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted, access = cuda.CUmemAllocationProp(), cuda.CUmemAccessDesc()
    wanted.type, wanted.requestedHandleTypes = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, posix
    wanted.location.type = access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = access.location.id = 0
    may = cuda.CUmemAccess_flags
    access.flags = may.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if fd is None else may.CU_MEM_ACCESS_FLAGS_PROT_READ
    new = fd is None
    handle = call("cuMemCreate", NBYTES, wanted, 0) if new else call("cuMemImportFromShareableHandle", fd, posix)
    address = call("cuMemAddressReserve", NBYTES, 0, 0, 0)
    call("cuMemMap", address, NBYTES, 0, handle, 0)
    call("cuMemSetAccess", address, NBYTES, [access], 1)
    return handle, int(address), posix


def make(channel: int) -> None:
    """A: fills, sends the device's UUID and the descriptor, and waits to be killed."""
    handle, address, posix = mapped(None)
    call("cuMemcpyHtoD", address, PATTERN, NBYTES)
    call("cuCtxSynchronize")
    fd = int(call("cuMemExportToShareableHandle", handle, posix, 0))
    identity = bytes(call("cuDeviceGetUuid", call("cuDeviceGet", 0)).bytes)[:16]
    socket.send_fds(socket.socket(fileno=channel), [identity], [fd])
    signal.pause()


def read(fd: int, write: str) -> int:
    """C: 0 when the bytes are right and the write fails; 10 for other bytes, 11 for a write that went through."""
    from cuda.bindings import driver as cuda

    _, address, _ = mapped(fd)
    seen = ctypes.create_string_buffer(NBYTES)
    call("cuMemcpyDtoH", ctypes.addressof(seen), address, NBYTES)
    if seen.raw != PATTERN:
        return 10
    what = (b"\0" * 4096, 4096) if write == "cuMemcpyHtoD" else (0, 4096)
    result = getattr(cuda, write)(address, *what)[0] or cuda.cuCtxSynchronize()[0]
    print(f"      {write} to the read-only mapping: {result!r}")
    return 0 if result else 11


def used_nbytes(device: bytes) -> int:
    """What NVML says is in use on the device; needs no CUDA."""
    nvml, handle, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    names = [f"{kind}-{uuid.UUID(bytes=device)}".encode() for kind in ("GPU", "MIG")]
    if nvml.nvmlInit_v2() or all(nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) for name in names):
        raise SystemExit(f"NVML does not know {names}")
    if nvml.nvmlDeviceGetMemoryInfo(handle, found):
        raise SystemExit("NVML does not tell the device's memory")
    return found[2]


def settled(device: bytes, below: int) -> int:
    """Used memory once it is ``below`` that, or after a while: a driver tidies up in its own time."""
    deadline = time.monotonic() + SETTLING_S
    while (now := used_nbytes(device)) >= below and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def main() -> int:
    """B."""
    ours, theirs = socket.socketpair()
    me = [sys.executable, __file__]
    maker = subprocess.Popen([*me, "make", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    device, fds, _, _ = socket.recv_fds(ours, 16, 1)
    if not fds:
        print("FAIL  A made no memory")
        return 1
    fd = fds[0]
    before = used_nbytes(device)
    maker.kill()
    maker.wait()
    held = settled(device, before)  # A's context goes
    readers = [subprocess.run([*me, "read", str(fd), write], pass_fds=[fd]).returncode for write in WRITES]
    os.close(fd)
    left = settled(device, held - NBYTES + 1)
    rows = {
        f"A's death leaves the memory: {before >> 20} MiB used before, {held >> 20} after": held - left >= NBYTES,
        "C finds the bytes through a read-only mapping": all(status in (0, 11) for status in readers),
        "writes through the read-only mapping fail": readers == [0, 0],
        f"B lets go: {held >> 20} MiB used before, {left >> 20} after": held - left >= NBYTES,
    }
    for text, passed in rows.items():
        print("PASS " if passed else "FAIL ", text)
    return 0 if all(rows.values()) else 1


if __name__ == "__main__":
    role, *words = sys.argv[1:] or ["hold"]
    if role == "make":
        make(int(words[0]))
    sys.exit(read(int(words[0]), words[1]) if role == "read" else main())
