"""Holds memory of kind ``cuda-ipc`` as a worker does that has filled it: ``… UUID NBYTES CARD_FD KEEPER_PID``.

Says its own pid when the memory is there; ends when it is killed, or its keeper is.
"""

from __future__ import annotations

import os
import signal
import sys

from weightcached.protocol.memory.cuda_ipc import kind_on
from weightcached.protocol.processes import die_with_parent


def main(uuid: str, nbytes: int, card: int, keeper_pid: int) -> None:
    die_with_parent(keeper_pid)
    held = kind_on(uuid).hold(card, nbytes=nbytes)
    print(os.getpid(), flush=True)
    while not held.closed:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
