"""The driver that is not one keeps its books: what is alive, whose it is, what failed when, what was left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from tests.support.fakecuda import CONTEXT_NBYTES, GRANULARITY, LiveMemory
from tests.support.legacy_holder import legacy_holder
from weightcached.protocol.memory.cuda import nvml
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.devices import find

MAKER = """
import os, socket, sys
from weightcached.protocol.memory.cuda import devices, physical
device = devices.find(None)
memory = physical.allocate(1 << 21, device=device)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [memory.export()])
sys.stdin.read()
"""


def run(fake_cuda, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**fake_cuda.whole_environment, **variables}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)


def test_a_descriptor_on_its_way_keeps_memory_whose_maker_was_killed(fake_cuda):
    """Held by nobody but a socket's queue, and by this process, which has no driver."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", MAKER, str(theirs.fileno())]
        with subprocess.Popen(
            command, env=fake_cuda.whole_environment, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
        ) as maker:
            assert ours.recv(1, socket.MSG_PEEK) == b"x"  # the descriptor stays in the queue with it
            maker.kill()
        uuid = fake_cuda.devices[0].uuid
        assert fake_cuda.memory() == [LiveMemory(uuid, GRANULARITY, maker.pid, "vmm")]
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        assert fake_cuda.used_nbytes() == GRANULARITY
        os.close(fd)
    assert fake_cuda.memory() == []


READER = """
import ctypes, os, sys
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.memory.cuda.devices import find
from weightcached.protocol.memory.cuda.legacy import OpenedMemory
with Context(find(None)) as context, context.current():
    opened = OpenedMemory(bytes.fromhex(sys.argv[1]), nbytes=4096)
    for _ in sys.stdin:
        print(ctypes.string_at(opened.address, 1)[0], flush=True)
"""


def test_legacy_memory_is_its_holders_and_who_reads_it_afterwards_is_killed(fake_cuda):
    with legacy_holder(fake_cuda, 4096, 5) as (holder, handle):
        command = [sys.executable, "-c", READER, handle.hex()]
        environment = fake_cuda.whole_environment
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, text=True, bufsize=1, stdin=pipe, stdout=pipe) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print("read", file=reader.stdin)
            assert reader.stdout.readline() == "5\n"
            assert [(memory.pid, memory.kind) for memory in fake_cuda.memory()] == [(holder.pid, "legacy")]
            holder.kill()
            holder.wait()
            assert fake_cuda.memory() == []
            fake_cuda.sweep()
            print("read", file=reader.stdin)
            assert reader.wait() == -signal.SIGBUS


def test_contexts_take_room_and_say_whose_they_are(cuda_here):
    device = find(None)
    with Context(device):
        assert cuda_here.fake.contexts() == [os.getpid()]
        assert nvml.memory(device.uuid).used_nbytes == CONTEXT_NBYTES
    assert nvml.memory(device.uuid).used_nbytes == 0


def test_a_call_fails_the_time_it_is_told_to_in_the_processes_it_is_told_to(fake_cuda):
    program = (
        "from weightcached.protocol.memory.cuda import devices\n"
        "from weightcached.protocol.errors import WeightCacheError\n"
        "for _ in range(3):\n"
        "    try: print(len(devices.devices()))\n"
        "    except WeightCacheError as error: print(error.found)\n"
    )
    assert run(fake_cuda, program).stdout.split() == ["1", "1", "1"]
    assert run(fake_cuda, program, FAKECUDA_FAIL="cuDeviceGet 2 1,cuInit 9 1").stdout.split() == [
        *("1", "CUDA_ERROR_INVALID_VALUE", "1")
    ]
    fake_cuda.fail(("cuDeviceGetCount", "*", 999))
    assert run(fake_cuda, program).stdout.split() == ["CUDA_ERROR_UNKNOWN"] * 3
    fake_cuda.fail()
    assert run(fake_cuda, program).stdout.split() == ["1", "1", "1"]


def test_what_a_process_has_not_given_back_is_told_when_it_ends(fake_cuda):
    program = (
        "from weightcached.protocol.memory.cuda import devices, physical\n"
        "from weightcached.protocol.memory.cuda.context import Context\n"
        "context = Context(devices.find(None))\n"
        "memory = physical.allocate(1 << 21, device=context.device)\n"
    )
    assert run(fake_cuda, program).returncode == 0
    assert fake_cuda.take_leaks() == ["handles=1"]
    assert run(fake_cuda, program + "memory.close()\n").returncode == 0
    assert fake_cuda.take_leaks() == []
