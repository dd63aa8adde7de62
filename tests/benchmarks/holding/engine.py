"""Opens held memory and watches its holder, as an attach does: ``… UUID NBYTES CARD_FD HOLDER_FD THREADS``.

So many threads of it compute in Python, without a pause. Says a word when it has attached.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from weightcached.client.holder import HolderWatch
from weightcached.protocol.memory.cuda_ipc import kind_on


def main(uuid: str, nbytes: int, card: int, holder: int, threads: int) -> None:
    opened = kind_on(uuid).map_private(card, nbytes=nbytes)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # thirty last words are no table
    opened.keep(HolderWatch(holder, where="the benchmark"))
    for _ in range(threads):
        threading.Thread(target=_compute, daemon=True).start()
    print("attached", flush=True)
    while not opened.closed:
        signal.pause()


def _compute() -> None:
    while True:
        sum(range(1000))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
