"""A process that holds legacy device memory: prints its handle in hex, then waits for its standard input's end.

Run as ``python -m tests.support.legacy_holder NBYTES BYTE``; the memory is full of BYTE.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from weightcached.protocol.memory.cuda.context import Context, Stream
from weightcached.protocol.memory.cuda.devices import find
from weightcached.protocol.memory.cuda.legacy import DeviceMemory
from weightcached.protocol.memory.cuda.staging import Pinned


@contextmanager
def legacy_holder(fake_cuda, nbytes: int, byte: int) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """The process and the handle. Killed in the end, should it still be there."""
    command = [sys.executable, "-m", "tests.support.legacy_holder", str(nbytes), str(byte)]
    environment = fake_cuda.whole_environment
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            yield holder, bytes.fromhex(holder.stdout.readline().decode())
        finally:
            holder.kill()


def main(nbytes: int, byte: int) -> None:
    device = find(None)
    with (
        Context(device) as context,
        context.current(),
        DeviceMemory(nbytes, device=device) as memory,
        Stream() as stream,
        Pinned(nbytes) as source,
    ):
        source.view()[:] = bytes([byte]) * nbytes
        stream.copy_in(memory.address, source.address, nbytes)
        stream.synchronize()
        print(memory.export().hex(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
