"""What earlier releases left in a vault is adopted by this one: samples that they wrote, kept as they are."""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from tests.daemon.samples.make import checkpoint
from tests.support.checkpoints import raw_tensor
from tests.support.manager import Manager
from weightcached.daemon.state_record import NBYTES, SLOT_NBYTES
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host

SAMPLES = sorted(path.parent for path in (Path(__file__).parent / "samples").glob("*/names.json"))


def memfd(name: str, data: bytes) -> int:
    """Sealed memory of that name, as a worker leaves it. The caller owns it."""
    with OwnedFds([host.allocate(len(data), name=name)]) as fds:
        os.pwrite(fds[0], data, 0)
        host.seal(fds[0])
        return fds.take(0)


def state_memfd(name: str, written: bytes) -> int:
    """A state memfd whose slots begin with what was written. The caller owns it."""
    with OwnedFds([os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)]) as fds:
        os.ftruncate(fds[0], NBYTES)
        fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for slot in range(2):
            nbytes, written = int.from_bytes(written[:4], "little"), written[4:]
            os.pwrite(fds[0], written[:nbytes], slot * SLOT_NBYTES)
            written = written[nbytes:]
        return fds.take(0)


def test_there_is_a_sample_of_this_release() -> None:
    assert [sample.name for sample in SAMPLES] == ["0.1"]


@pytest.mark.parametrize("with_state", [True, False], ids=["with its state", "without"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_sample_is_adopted_verified_and_proven(
    sample: Path, with_state: bool, runtime_dir: Path, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model")
    listed = json.loads((sample / "names.json").read_text())
    with Manager(runtime_dir.parent) as manager:
        for file, called in listed.items():
            data = (sample / file).read_bytes()
            if file != "state":
                manager.add(called["stored"], memfd(called["memfd"], data))
            elif with_state:
                manager.add(called["stored"], state_memfd(called["memfd"], data))
        daemon = manager.start(model, runtime_dir, "--verify-on-adopt", real=True)
        try:
            report = daemon.wait_until("ready")
            assert report.last_error is None
            assert (report.bytes_read, report.vault) == (0, "kept")
            assert report.generation is not None
            assert listed["manifest"]["stored"] == f"g{report.generation}.m"
            daemon.wait_logged("verified")
            if with_state:
                assert report.proven  # by the content of the same checkpoint at another path, before it was served
                assert (report.starts, report.adoptions) == (2, 1)
                assert report.digest is not None
            grant, fds = daemon.attach() if with_state else daemon.attach(want="current")
            with fds:
                manifest = Manifest.decode(os.pread(fds[0], grant.manifest_nbytes, 0))
                assert (sample / "manifest").read_bytes() == os.pread(fds[0], grant.manifest_nbytes, 0)
                row = manifest.row("model.embed_tokens.weight")
                assert os.pread(fds[1], row.nbytes, row.offset) == raw_tensor(row.name, row.shape, "BF16").data
        finally:
            daemon.stop(signal.SIGKILL)
