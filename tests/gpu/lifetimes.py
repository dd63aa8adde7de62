"""Rows about what lives how long: the probe, a keeper without a context, memory that may not be written, addresses that
stay while what is mapped there changes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.gpu import listing
from tests.gpu.peer import PATTERN
from tests.gpu.row import GIB, Row, Setting, Skipped, child, line_of, require, torch_with_cuda
from tests.support import device_memory as memory
from weightcached.protocol.memory.cuda import devices, nvml, physical
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.mappings import Mapping

PROBE = Path(__file__).with_name("probe.py")
PEER = "tests.gpu.peer"
SPOILERS = {"spoil": "copy", "spoil-by-kernel": "kernel"}
PAGE_NBYTES = 2 << 20


def probe(setting: Setting) -> str:
    """What everything rests on, by a program of its own that needs cuda-bindings alone."""
    if not PROBE.exists():
        raise Skipped("tests/gpu/probe.py is not in this checkout")
    environment = {
        **os.environ,
        "PROBE_NBYTES": str(-(-setting.nbytes(GIB) // PAGE_NBYTES) * PAGE_NBYTES),
        "PROBE_SPARE_NBYTES": str(setting.spare_nbytes),
    }
    ended = subprocess.run([sys.executable, "-P", str(PROBE)], capture_output=True, text=True, env=environment)
    said = (ended.stdout + ended.stderr).strip().splitlines()
    require(ended.returncode == 0, f"the probe ended with {ended.returncode}: {' / '.join(said[-3:])}")
    return " / ".join(" ".join(line.split()) for line in said)


def without_context(setting: Setting) -> str:
    """A process that allocates and exports as the keeper does: it takes the memory, nothing beside it, and is not on
    the device's list of processes, where one with a context is.
    """
    before = nvml.memory(setting.uuid).used_nbytes
    with child(PEER, "keep", setting.uuid, str(setting.nbytes(GIB))) as keeper:
        kept = int(line_of(keeper))
        beyond = nvml.memory(setting.uuid).used_nbytes - before - kept
        said = listing.without_context(setting, keeper.pid, who="the process")
    require(beyond <= setting.spare_nbytes, f"{beyond} bytes are used beyond the {kept} that were allocated")
    return f"{kept} bytes allocated, {beyond} used beyond them; {said}"


def descriptor_alone(setting: Setting) -> str:
    """Made by a process that is killed, kept by a descriptor in another that has no context, checked by a third."""
    nbytes = setting.nbytes(GIB)
    before = nvml.memory(setting.uuid).used_nbytes
    with _made(setting.uuid, nbytes) as fd:
        used = nvml.memory(setting.uuid).used_nbytes - before
        require(used >= nbytes, f"{used} bytes are used, of {nbytes} that a descriptor should keep")
        _told("check", setting.uuid, nbytes, fd, wanted="same")
    return f"{used} bytes used while nothing but a descriptor was left"


def read_only(setting: Setting) -> str:
    """Processes that map it to read try to write, by the driver's copy and by a kernel of torch's, each its own, for a
    context does not survive it: both fail, and nothing has changed.
    """
    nbytes = setting.nbytes(GIB)
    if not setting.rehearsal:
        torch_with_cuda()
    with _made(setting.uuid, nbytes) as fd:
        said = [f"{how}: {_spoilt(setting, what, nbytes, fd)}" for what, how in SPOILERS.items()]
        _told("check", setting.uuid, nbytes, fd, wanted="same")
    return "; ".join(said)


def _spoilt(setting: Setting, what: str, nbytes: int, fd: int) -> str:
    """What became of one who wrote; AssertionError where he could."""
    arguments = (what, setting.uuid, str(nbytes), str(fd), "host" if setting.rehearsal else "device")
    with child(PEER, *arguments, fds=(fd,)) as spoiler:
        assert spoiler.stdout is not None
        assert spoiler.stdin is not None
        reached, said = spoiler.stdout.readline().strip(), spoiler.stdout.readline().strip()
        spoiler.stdin.close()
        status = spoiler.wait()
    require(reached == "mapped", f"the process that was to write ended with {status} before it could try")
    require(said != "written", f"a write through a read-only mapping went through ({what})")
    return said or f"the process that wrote died (status {status})"


def remapped(setting: Setting) -> str:
    """Two memories in turn at the same addresses: each time its own bytes, and the addresses never change."""
    device = devices.find(setting.uuid)
    multiple = physical.granularity(device)
    with Context(device) as context, context.current():
        first = physical.allocate(multiple, device=device)
        second = physical.allocate(multiple, device=device)
        with first, second, Mapping(multiple, alignment=multiple, device=device) as mapping:
            address = mapping.address
            for allocation, data in ((first, PATTERN), (second, PATTERN[::-1])):
                mapping.map(allocation, writable=True)
                memory.write(address, data)
                mapping.unmap()
            for allocation, data in ((first, PATTERN), (second, PATTERN[::-1]), (first, PATTERN)):
                mapping.map(allocation, writable=False)
                require(memory.read(address, len(data)) == data, "other bytes after mapping anew")
                require(mapping.address == address, "the addresses changed")
                mapping.unmap()
    return f"three times at {address:#x}"


@contextmanager
def _made(uuid: str, nbytes: int) -> Iterator[int]:
    """A descriptor of memory that another process made and filled, and that was killed then. No context here."""
    ours, theirs = socket.socketpair()
    with ours, theirs, child(PEER, "make", uuid, str(nbytes), str(theirs.fileno()), fds=(theirs.fileno(),)) as maker:
        require(line_of(maker) == "made", "no memory was made")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    try:
        yield fds[0]
    finally:
        os.close(fds[0])


def _told(what: str, uuid: str, nbytes: int, fd: int, *, wanted: str) -> None:
    """Have another process do it, and end; AssertionError when it answers anything else."""
    with child(PEER, what, uuid, str(nbytes), str(fd), fds=(fd,)) as peer:
        said = line_of(peer)
        assert peer.stdin is not None
        with suppress(BrokenPipeError):
            peer.stdin.close()
        require(peer.wait() == 0, f"{what}: ended with {peer.returncode}")
    require(said == wanted, f"{what}: {said}, not {wanted}")


ROWS = (
    Row("probe", "memory lives while a descriptor of it does, whoever dies", probe),
    Row("descriptor", "the same by the project's own calls, across three processes", descriptor_alone),
    Row("context", "a keeper takes nothing of the device beyond the weights", without_context),
    Row("read-only", "what is mapped read-only cannot be written, and is not changed", read_only),
    Row("remap", "other memory at the same addresses", remapped),
)
