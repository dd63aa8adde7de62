"""Fetches what a machine with a GPU may lack into tests/gpu/wheelhouse/, where there is a network.

    python tests/gpu/carry.py                                  # what the checkout has there, anew: remove the old first
    python tests/gpu/carry.py --python-version 3.14 --platform manylinux_2_28_x86_64 uvloop

The options are pip's, for another machine than this; and what else to fetch, by name. What those need comes
along. ``check.py``, which finds it there, says what it lacks. Take the whole checkout along, with that folder in it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.check import CARRIED, WHEELHOUSE

PLATFORM = "manylinux_2_17_x86_64"
PYTHONS = ("3.11", "3.12", "3.13")
"""For which the checkout has them."""


def main(arguments: list[str]) -> int:
    """Download wheels; returns pip's status, of the first that fails."""
    machines = [arguments] if arguments else [[f"--python-version={one}", f"--platform={PLATFORM}"] for one in PYTHONS]
    return next(filter(None, map(fetched, machines)), 0)


def fetched(options: list[str]) -> int:
    """pip's status."""
    download = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", f"--dest={WHEELHOUSE}"]
    return subprocess.run([*download, *options, *CARRIED.values()]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
