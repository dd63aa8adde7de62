"""Does a descriptor alone keep a GPU's memory? The first thing to run on any GPU: `python tests/gpu/probe.py`.

Everything rests on it. A makes memory, fills it and sends a descriptor of it to B, which calls nothing of CUDA, and is
killed: NVML's used memory must hold that and no more. C imports it read-only: it must find the bytes, and a write
through its mapping must fail. B lets go: the memory must come back. Where one of these fails, the daemon needs a
process that holds the memory instead. Needs cuda-bindings alone; tries the first device; prints PASS or FAIL, and exits
1 on any FAIL.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

from cuda.bindings import driver as cuda

NBYTES = int(os.environ.get("PROBE_NBYTES", 256 << 20))  # a multiple of 2 MiB
SPARE = int(os.environ.get("PROBE_SPARE_NBYTES", 16 << 20))  # that a driver keeps for itself, more or less
SETTLING_S = float(os.environ.get("PROBE_SETTLING_S", 10))
PATTERN = (bytes(range(251)) * (NBYTES // 251 + 1))[:NBYTES]
WRITES = {"cuMemcpyHtoD": (bytes(4096), 4096), "cuMemsetD8": (0, 4096)}
POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def call(name, *arguments):
    result, *values = getattr(cuda, name)(*arguments)
    return sys.exit(f"{name}: {result!r}") if result else values[0] if values else None


def mapped(fd, flags):
    """The memory behind ``fd``, or new memory: its handle and its address."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
    wanted, access = cuda.CUmemAllocationProp(), cuda.CUmemAccessDesc()
    wanted.type, wanted.requestedHandleTypes = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, POSIX
    wanted.location.type = access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = flags
    handle = call("cuMemImportFromShareableHandle", fd, POSIX) if fd else call("cuMemCreate", NBYTES, wanted, 0)
    address = call("cuMemAddressReserve", NBYTES, 0, 0, 0)
    call("cuMemMap", address, NBYTES, 0, handle, 0)
    call("cuMemSetAccess", address, NBYTES, [access], 1)
    return handle, int(address)


def make(channel):
    """A: fills, sends the descriptor, and waits to be killed."""
    handle, address = mapped(None, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    call("cuMemcpyHtoD", address, PATTERN, NBYTES)
    call("cuCtxSynchronize")
    fd = int(call("cuMemExportToShareableHandle", handle, POSIX, 0))
    socket.send_fds(socket.socket(fileno=int(channel)), [b"!"], [fd])
    signal.pause()


def read(fd, write):
    """C: exits with 10 for other bytes, 11 for a write that succeeds, else with 0."""
    _, address = mapped(int(fd), cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
    seen = ctypes.create_string_buffer(NBYTES)
    call("cuMemcpyDtoH", ctypes.addressof(seen), address, NBYTES)
    result = getattr(cuda, write)(address, *WRITES[write])[0] or cuda.cuCtxSynchronize()[0]
    print(f"      {write} to the read-only mapping: {result!r}")
    return 10 if seen.raw != PATTERN else 0 if result else 11


def device():
    """Says the first device's UUID, without a context."""
    call("cuInit", 0)
    print(uuid.UUID(bytes=call("cuDeviceGetUuid", call("cuDeviceGet", 0)).bytes[:16]))


def used(device, at_most):
    """What NVML says is in use: once it is ``at_most`` that, or after a while. A driver tidies up in its own time."""
    nvml, handle, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    names = [f"{kind}-{device}".encode() for kind in ("GPU", "MIG")]
    if nvml.nvmlInit_v2() or all(nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) for name in names):
        sys.exit(f"NVML does not know {names}")
    deadline = time.monotonic() + SETTLING_S
    while not nvml.nvmlDeviceGetMemoryInfo(handle, found):
        if found[2] <= at_most or time.monotonic() >= deadline:
            return found[2]
        time.sleep(0.05)
    sys.exit("NVML does not tell the device's memory")


def main():
    """B."""
    me = [sys.executable, __file__]
    name = subprocess.run([*me, "device"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    start = used(name, at_most=1 << 62)
    ours, theirs = socket.socketpair()
    with subprocess.Popen([*me, "make", str(theirs.fileno())], pass_fds=[theirs.fileno()]) as maker:
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        maker.kill()
    if not fds:
        sys.exit("FAIL  A made no memory")
    held = used(name, at_most=start + NBYTES + SPARE)  # A's context goes
    readers = [subprocess.run([*me, "read", str(fds[0]), write], pass_fds=fds).returncode for write in WRITES]
    os.close(fds[0])
    left = used(name, at_most=start + SPARE)
    kept = abs(held - start - NBYTES) <= SPARE
    rows = {
        f"A's death leaves the memory: {start >> 20} MiB used before A, {held >> 20} after": kept,
        "C finds the bytes through a read-only mapping": all(status in (0, 11) for status in readers),
        "writes through the read-only mapping fail": readers == [0, 0],
        f"B lets go: {start >> 20} MiB used before A, {left >> 20} in the end": left - start <= SPARE,
    }
    for text, passed in rows.items():
        print("PASS " if passed else "FAIL ", text)
    return 0 if all(rows.values()) else 1


if __name__ == "__main__":
    role, *words = sys.argv[1:] or ["main"]
    sys.exit({"device": device, "make": make, "read": read, "main": main}[role](*words))  # type: ignore[operator]
