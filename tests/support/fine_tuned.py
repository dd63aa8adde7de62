"""Several generations of one model: checkpoints of one config with other bytes, and the grants that real daemons give
for them, for a daemon that follows a script to hand out.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.daemons import daemon
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import Grant
from weightcached.protocol.testing import Send


def fine_tuned(directory: Path, target: Path, *, every: int = 2) -> Path:
    """A copy of a checkpoint of two-byte floats in which the sign of every other number (or of one in ``every``) is
    the other one.
    """
    shutil.copytree(directory, target)
    for path in target.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (header_nbytes,) = struct.unpack_from("<Q", data)
        numbers = np.frombuffer(data, np.uint16, offset=8 + header_nbytes)
        numbers[::every] ^= 0x8000
        path.write_bytes(data)
    return target


@dataclass(frozen=True)
class Generation:
    """A real daemon's grant, which outlives that daemon."""

    message: Grant
    fds: OwnedFds

    def step(self) -> Send:
        return Send(self.message, tuple(self.fds[number] for number in range(len(self.fds))))


@contextmanager
def generation_of(model_dir: Path, runtime_dir: Path, **options: str) -> Iterator[Generation]:
    """What the real loader makes of a checkpoint. ``runtime_dir`` is made."""
    runtime_dir.mkdir(mode=0o755)
    with daemon(model_dir, runtime_dir, **options) as served:
        served.wait_until("ready")
        message, fds = served.attach()
    with fds:
        yield Generation(message, fds)
