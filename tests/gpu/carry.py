"""Fetches what a machine with a GPU may lack into tests/gpu/wheelhouse/, where there is a network.

    python tests/gpu/carry.py --python-version 3.12

The options are pip's, for another machine than this: ``--python-version``, ``--platform``; and what else to fetch, by
name. Then take the whole checkout along, with that folder in it: ``check.py`` finds it there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.check import CARRIED, WHEELHOUSE


def main(arguments: list[str]) -> int:
    """Download wheels; returns pip's status."""
    download = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-deps", f"--dest={WHEELHOUSE}"]
    return subprocess.run([*download, *arguments, *CARRIED.values()]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
