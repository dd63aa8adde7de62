"""Commands that name a GPU's place: what they find there, and what a snapshot of it is. On the driver without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import REAL, TIMEOUT_S, daemon
from tests.support.fakecuda import FakeCuda, FakeDevice
from tests.support.gpu_daemons import digests_from_disk, gpu_daemon
from tests.support.gpu_engine import gpu_engine
from tests.support.unprivileged import ROOT
from weightcached.protocol.command_line import USAGE_EXIT
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.snapshot import open_snapshot


def run(fake: FakeCuda | None, *words: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ if fake is None else fake.whole_environment
    return subprocess.run(
        [*REAL, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def save(fake: FakeCuda, model: Path, directory: Path, runtime_dir: Path, *words: str) -> None:
    saved = run(
        fake,
        *("snapshot", "save", model, directory, "--mode", "require", "--runtime-dir", runtime_dir),
        *("--cache-dir", runtime_dir / "digests", *words),
    )
    assert (saved.returncode, saved.stderr) == (0, "")


def content(directory: Path) -> tuple[list[bytes], dict[str, Any], Manifest]:
    """The segments' bytes, and what the manifest says of them, without what two loads differ in."""
    with open_snapshot(directory, "host-tp0of1") as snapshot:
        segments = [Path(f"/proc/self/fd/{fd}").read_bytes() for fd in snapshot.files.values()]
        meta = snapshot.manifest.meta.model_dump()
        for name in ("generation", "seconds", "bytes_read", "receipts_version"):
            meta.pop(name)
        return segments, meta, snapshot.manifest


def test_a_snapshot_of_a_gpus_daemon_is_that_of_a_host_daemon(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        save(fake_cuda, model, tmp_path / "gpu", runtime_dir, "--device", "cuda")
        assert served.report().lease_count == 0
    with daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        save(fake_cuda, model, tmp_path / "host", runtime_dir)
    ours, theirs = content(tmp_path / "gpu"), content(tmp_path / "host")
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert list(ours[2]) == list(theirs[2])
    for device in ("cpu", "cuda"):
        tried = run(fake_cuda, "snapshot", "load", model, tmp_path / "gpu", "--device", device)
        assert (tried.returncode, tried.stderr) == (0, "")
        assert "all digests right" in tried.stdout
    with gpu_daemon(fake_cuda, model, runtime_dir, "--snapshot", str(tmp_path / "gpu")) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            assert engine.ask("digests") == digests_from_disk(model)


def test_a_snapshot_that_is_tried_on_a_full_gpu_says_so(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    saved = run(
        None, "snapshot", "save", model, tmp_path, "--mode", "off", "--cache-dir", runtime_dir / "digests", "--json"
    )
    assert saved.returncode == 0, saved.stderr
    fake_cuda.plug(FakeDevice(nbytes=1 << 20))
    tried = run(fake_cuda, "snapshot", "load", model, tmp_path, "--device", "cuda", "--json")
    assert tried.returncode == 1
    assert json.loads(tried.stdout)["error"]["code"] == "insufficient_memory"


def test_wait_status_and_release_find_a_gpu_by_its_name(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    first, second = FakeDevice(), FakeDevice()
    fake_cuda.plug(first, second)
    place = ("--runtime-dir", runtime_dir)
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        named = ("--device", f"cuda:{first.uuid}")
        ready = run(None, "wait", *place, *named, "--timeout", 60)  # a whole UUID needs no driver
        assert (ready.returncode, ready.stderr) == (0, "")
        assert run(fake_cuda, "wait", *place, "--device", "cuda:0", "--timeout", 60).returncode == 0
        late = run(fake_cuda, "wait", *place, "--device", "cuda:1", "--timeout", 0)
        assert late.returncode == 1
        assert f"default/gpu-{second.uuid}" in late.stderr
        unseen = run(fake_cuda, "wait", *place, "--device", "cuda:7", "--timeout", 0)
        assert unseen.returncode == 2
        assert "does not see the device" in unseen.stderr
        both = run(fake_cuda, "wait", *place, *named, "--tp-size", 2, "--timeout", 0)
        assert both.returncode == USAGE_EXIT
        [seen] = json.loads(run(fake_cuda, "status", *place, "--json").stdout)["daemons"]
        assert seen["place"] == f"default/gpu-{first.uuid}"
        other = run(fake_cuda, "release", *place, "--device", "cuda:1")
        assert (other.returncode, "nothing is cached there" in other.stdout) == (0, True)
        assert served.report().state == "ready"
        assert run(fake_cuda, "release", *place, "--device", "cuda:7").returncode == 1
        gone = run(fake_cuda, "release", *place, "--device", "cuda:0")
        assert (gone.returncode, gone.stderr) == (0, "")
        assert f"default/gpu-{first.uuid}: gave up 1 generation" in gone.stdout
        assert fake_cuda.used_nbytes() == 0
        assert served.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("against_disk", [False, True])
def test_verify_compares_what_is_on_the_gpu(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, against_disk: bool
) -> None:
    words = ["--against-disk"] if against_disk else []
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        verified = run(fake_cuda, "verify", model, "--runtime-dir", runtime_dir, "--device", "cuda", "--json", *words)
        assert (verified.returncode, verified.stderr) == (0, "")
        [rank] = json.loads(verified.stdout)["ranks"]
        assert rank["generation"] == served.report().generation
        assert {one["verdict"] for one in [*rank["manifest"], *(rank["disk"] or [])]} == {"equal"}
