"""Starts a holder and stays, for it to die with: ``… UUID NBYTES CARD_FD``. The holder's words are passed on."""

from __future__ import annotations

import os
import subprocess
import sys


def main(uuid: str, nbytes: str, card: str) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.holding.holder", uuid, nbytes, card, str(os.getpid())]
    subprocess.Popen(command, pass_fds=[int(card)]).wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
