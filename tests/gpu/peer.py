"""The other process of a row: ``python -m tests.gpu.peer WHAT UUID NBYTES [FD]``. Answers with one line, then waits for
the end of its standard input, holding what it holds.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from tests.gpu.row import require
from tests.support import device_memory as memory
from weightcached.protocol.errors import DeviceFailed
from weightcached.protocol.memory.cuda import devices, physical
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.legacy import OpenedMemory
from weightcached.protocol.memory.cuda_vmm import kind_on

PATTERN = bytes(range(256)) * 4096
"""What ``make`` leaves at both ends of the memory."""


def make(uuid: str, nbytes: int, channel: int) -> None:
    """New memory, filled, of which a descriptor goes out through ``channel``, a socket."""
    with memory.mapped(uuid, nbytes) as mapped, socket.socket(fileno=channel) as peer:
        for start in ends(mapped.nbytes):
            memory.write(mapped.address + start, PATTERN)
        fd = mapped.allocation.export()
        socket.send_fds(peer, [b"!"], [fd])
        answer("made")


def check(uuid: str, nbytes: int, fd: int) -> None:
    """``same`` where both ends are what ``make`` wrote."""
    with memory.mapped(uuid, nbytes, fd=fd, writable=False) as mapped:
        found = [memory.read(mapped.address + start, len(PATTERN)) for start in ends(mapped.nbytes)]
        answer("same" if all(piece == PATTERN for piece in found) else "other bytes")


def spoil(uuid: str, nbytes: int, fd: int) -> None:
    """Writes where it may only read. A device refuses the copy, or ends this process's context."""
    with memory.mapped(uuid, nbytes, fd=fd, writable=False) as mapped:
        print("mapped", flush=True)
        try:
            memory.write(mapped.address, bytes(len(PATTERN)))
        except DeviceFailed as refusal:
            print(f"refused: {refusal.found}", flush=True)
            os._exit(0)  # of a context that is lost, nothing can be given back in order
        answer("written")


def spoil_by_kernel(uuid: str, nbytes: int, fd: int, where: str) -> None:
    """The same by a kernel of torch's, as an engine's would do it: through a tensor of the mapping that engines get.
    ``where`` is ``host`` for the driver whose addresses are the host's.
    """
    import torch

    from tests.support.gpu_engine import host_tensor
    from weightcached.client.segments import device_tensor

    mapping = kind_on(uuid).map_readonly(fd, nbytes=nbytes)
    tensor = host_tensor(mapping) if where == "host" else device_tensor(mapping)
    require(bytes(tensor[: len(PATTERN)].cpu().numpy()) == PATTERN, "a tensor of the mapping has other bytes")
    print("mapped", flush=True)
    try:
        tensor.add_(1)  # a kernel for sure, where zeros might be a copy's work
        if where != "host":
            torch.cuda.synchronize()
    except RuntimeError as refusal:
        print(f"refused: {str(refusal).splitlines()[0]}", flush=True)
        os._exit(0)
    answer("written")


def keep(uuid: str, nbytes: int) -> None:
    """As the keeper does: memory and a descriptor of it, and no context."""
    device = devices.find(uuid)
    rounded = physical.rounded(nbytes, physical.granularity(device))
    with physical.allocate(rounded, device=device) as allocation:
        fd = allocation.export()
    answer(str(rounded))
    os.close(fd)


def context(uuid: str) -> None:
    """What NVML lists a process for."""
    with Context(devices.find(uuid)):
        answer("there")


def opened(uuid: str, nbytes: int, handle: str) -> None:
    """Seconds to open memory of another process by its handle (``cuda-ipc``)."""
    with Context(devices.find(uuid)) as context, context.current():
        started_s = time.perf_counter()
        with OpenedMemory(bytes.fromhex(handle), nbytes=nbytes):
            answer(str(time.perf_counter() - started_s))


def ends(nbytes: int) -> tuple[int, int]:
    """Where in memory of ``nbytes`` the pattern stands."""
    return 0, nbytes - len(PATTERN)


def answer(word: str) -> None:
    print(word, flush=True)
    sys.stdin.read()


def main(arguments: list[str]) -> None:
    what, uuid, nbytes, *rest = arguments
    if what == "keep":
        keep(uuid, int(nbytes))
    elif what == "context":
        context(uuid)
    elif what == "opened":
        opened(uuid, int(nbytes), rest[0])
    elif what == "spoil-by-kernel":
        spoil_by_kernel(uuid, int(nbytes), int(rest[0]), rest[1])
    else:
        {"make": make, "check": check, "spoil": spoil}[what](uuid, int(nbytes), int(rest[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
