"""Engines and keepers end and come back in an RL loop: both ranks go on with what was pushed last."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.client.publish.test_publish import referenced, trained, where
from tests.support.daemons import TIMEOUT_S, Daemon
from tests.support.groups import kill_and_wait, versions
from tests.support.unprivileged import ROOT
from weightcached.client.agreement import Standing, require_agreement
from weightcached.client.publish import publish

ENGINE = """
import hashlib, json, sys
from weightcached.client import attach
model, runtime_dir, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = {"layout": "fused", "tp_size": size, "tp_rank": rank, "mode": "require", "want": "current"}
with attach(model, runtime_dir=runtime_dir, **options) as weights:
    digests = {name: hashlib.sha256(weights.numpy(name, bits=True).tobytes()).hexdigest() for name in weights}
    found = {"version": weights.version, "receipts_version": weights.receipts_version}
    print(json.dumps({**found, "generation": weights.generation, "digests": digests}), flush=True)
    for _ in sys.stdin:
        connected = weights.lease.wait_for("connected", timeout_s=60)
        weights.verify()
        print(json.dumps([connected, weights.lease.resumes, weights.version]), flush=True)
"""


@dataclass
class Engine:
    """One rank of an engine, in a process of its own, that has attached to what is current."""

    process: subprocess.Popen[str]
    found: dict[str, Any]

    def ask(self) -> Any:
        """Whether its lease is connected, how often it was resumed, and of which version it is; its bytes are right."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def engine(ranks: list[Daemon]) -> Iterator[list[Engine]]:
    """All ranks of an engine. Killed at the end."""
    with ExitStack() as stack:
        processes = []
        for rank, served in enumerate(ranks):
            words = [served.model_dir, served.place.runtime_dir, len(ranks), rank]
            process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, *map(str, words)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        made = []
        for process in processes:
            assert process.stdout is not None
            made.append(Engine(process, json.loads(process.stdout.readline())))
        yield made
        for process in processes:
            process.send_signal(signal.SIGKILL)
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL


def require_pushed(
    started: list[Engine], ranks: list[Daemon], tensors: Mapping[str, torch.Tensor], version: str, directory: Path
) -> None:
    """All ranks have this version, agree, and have the bytes that a load of these tensors would give."""
    fields = ("version", "receipts_version", "generation")
    standings = [
        Standing(
            rank=served.place.device,
            place=str(served.place.socket_path),
            source="daemon",
            **{field: one.found[field] for field in fields},
        )
        for one, served in zip(started, ranks, strict=True)
    ]
    require_agreement(standings)
    assert [one.version for one in standings] == [version] * len(ranks)
    for one, parameters in zip(started, referenced(ranks, tensors, directory), strict=True):
        assert one.found["digests"] == {name: hashlib.sha256(data).hexdigest() for name, data in parameters.items()}


def test_an_engine_that_is_started_again_has_what_was_pushed_whichever_keepers_were(
    ranks: list[Daemon], model: Path, tmp_path: Path
) -> None:
    first = trained(model, 2.0)
    version = publish(first, **where(ranks))
    with engine(ranks) as started:
        require_pushed(started, ranks, first, version, tmp_path / "pushed")
        for served in ranks:
            kill_and_wait(served)  # the next one adopts what was pushed: no checkpoint has it
        assert versions(ranks) == [version, version]
        assert [one.ask() for one in started] == [[True, 1, version]] * 2
    with engine(ranks) as again:
        require_pushed(again, ranks, first, version, tmp_path / "adopted")
        assert [one.found["generation"] for one in again] == [one.found["generation"] for one in started]
    norm = "model.norm.weight"
    changed = {norm: trained(model, 3.0)[norm]}
    later = publish(changed, partial=True, **where(ranks))
    with engine(ranks) as once_more:
        require_pushed(once_more, ranks, {**first, **changed}, later, tmp_path / "on top of it")
