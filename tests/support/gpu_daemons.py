"""Daemons with weights on a GPU, on the driver that needs none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.computing_worker import COMPUTING
from tests.support.daemons import Daemon, daemon, supervised_daemon
from tests.support.fakecuda import FakeCuda, FakeDevice
from tests.support.unprivileged import ROOT
from weightcached.client import attach
from weightcached.protocol.places import Place

IPC = ("--memory", "cuda-ipc")
IPC_ENGINE: dict[str, Any] = {"device": "cuda", "memory": "cuda-ipc"}
"""A daemon's arguments, and an engine's options, for memory that dies with its holder."""


def place_of(device: FakeDevice, runtime_dir: Path) -> Place:
    return Place(runtime_dir, "default", f"gpu-{device.uuid}")


@contextmanager
def gpu_daemon(
    fake: FakeCuda,
    model: Path,
    runtime_dir: Path,
    *extra: str,
    supervised: bool = False,
    device: int = 0,
    computes: bool = False,
    **variables: str,
) -> Iterator[Daemon]:
    """A daemon with the real worker on this device of the table. ``computes``: a worker whose torch has that
    device (`computing_worker.py`); not for one that is supervised.
    """
    wanted = fake.devices[device]
    maker = supervised_daemon if supervised else daemon
    given: dict[str, Any] = {"environment": {**fake.environment, **variables}}
    if computes:
        given["command"] = COMPUTING
        given["environment"]["PYTHONPATH"] = str(ROOT)
    with maker(model, runtime_dir, "--device", f"cuda:{wanted.uuid}", *extra, **given) as served:
        served.place = place_of(wanted, runtime_dir)
        yield served


def digests_from_disk(model: Path) -> dict[str, str]:
    import hashlib

    import torch

    with attach(model, mode="off") as weights:
        return {
            name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in weights.items()
        }
