"""Who holds a GPU's memory that no daemon knows of: what NVML says, set against the daemons' books."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.test_exporter import exporter
from tests.support.fakecuda import CONTEXT_NBYTES, CudaHere, FakeCuda, FakeDevice
from tests.support.gpu_daemons import gpu_daemon
from tests.support.gpu_engine import gpu_engine
from tests.support.reports import READY, samples, value
from weightcached.daemon.gpus import Gpu, as_json, in_words, look_at_gpus
from weightcached.daemon.metrics import render
from weightcached.daemon.seen import Seen
from weightcached.daemon.status import render as render_status
from weightcached.protocol.errors import DaemonUnreachable, DeviceAbsent
from weightcached.protocol.memory.cuda import devices, nvml
from weightcached.protocol.memory.cuda.context import Context
from weightcached.protocol.messages import LeaseInfo
from weightcached.protocol.places import Place


@pytest.fixture
def context(cuda_here: CudaHere) -> Iterator[str]:
    """This process has a context on the one GPU, whose UUID this is: NVML lists it."""
    device = devices.find(None)
    with Context(device):
        yield device.uuid


def seen(uuid: str, *, lease: int = 1, keeper: int = 1) -> Seen:
    leases = (LeaseInfo(pid=lease, uid=0, name="engine", age_s=5.0),)
    report = READY.model_copy(update={"leases": leases, "lease_count": 1, "pid": keeper})
    return Seen(Place(Path("/run/weightcached"), "default", f"gpu-{uuid}"), report=report)


def test_a_process_that_no_daemon_knows_is_told_with_what_it_holds(context: str) -> None:
    [gpu] = look_at_gpus([seen(context)])
    assert [(holder.pid, holder.nbytes) for holder in gpu.strangers] == [(os.getpid(), CONTEXT_NBYTES)]
    assert (gpu.used_nbytes, gpu.unexplained_nbytes, gpu.untold) == (CONTEXT_NBYTES, CONTEXT_NBYTES, 0)
    listed = sum(one.resident_nbytes for one in READY.held)
    assert gpu.cached_nbytes == max(listed, READY.resident_nbytes) + READY.quarantined_nbytes
    assert f"processes that no daemon knows: pid {os.getpid()} (" in in_words(gpu)
    assert any(f"pid {os.getpid()} (" in line for line in render_status([seen(context)], [gpu]))


def test_engines_with_a_lease_and_what_daemons_started_are_known(context: str) -> None:
    for known in (
        seen(context, lease=os.getpid()),
        seen(context, keeper=os.getppid()),
        seen(context, keeper=os.getpid()),
    ):
        [gpu] = look_at_gpus([known])
        assert gpu.strangers == ()
        assert "no daemon knows" not in in_words(gpu)


def test_a_daemon_of_another_gpu_explains_nothing(context: str) -> None:
    other = FakeDevice().uuid
    found = {gpu.uuid: gpu for gpu in look_at_gpus([seen(other, lease=os.getpid())])}
    assert [holder.pid for holder in found[context].strangers] == [os.getpid()]
    assert found[context].cached_nbytes == 0
    assert "Not Found" in str(found[other].problem)  # a place whose GPU is not there is not left out
    assert "Not Found" in in_words(found[other])
    assert as_json([found[other]])["gpus"] == [{"device": f"gpu-{other}", "problem": found[other].problem}]


def test_a_mig_instance_is_found_by_its_place(cuda_here: CudaHere) -> None:
    whole, part = FakeDevice(), FakeDevice(mig=True)
    cuda_here.fake.plug(whole, part)
    assert nvml.uuids() == (whole.uuid,)
    assert [(gpu.uuid, gpu.problem) for gpu in look_at_gpus([seen(part.uuid)])] == [
        (whole.uuid, None),
        (part.uuid, None),
    ]


def test_without_nvml_there_is_no_gpu_and_where_it_fails_a_place_says_so(
    cuda_here: CudaHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = cuda_here.fake.devices[0].uuid
    cuda_here.fake.fail(("nvmlDeviceGetCount_v2", "*", 15))
    [gpu] = look_at_gpus([seen(uuid)])
    assert "GPU is lost" in str(gpu.problem)

    def missing() -> None:
        raise DeviceAbsent("no library")

    monkeypatch.setattr(nvml, "uuids", missing)
    assert look_at_gpus([seen(uuid)]) == ()
    lines = render_status([Seen(seen(uuid).place, problem=DaemonUnreachable("dead"))], ())
    assert not any(line.startswith("gpu-") for line in lines)


def test_metrics_have_a_family_for_each_figure_and_none_for_what_is_not_known() -> None:
    strangers = (nvml.Holder(7, 300), nvml.Holder(8, None))
    found = samples(render([], None, [Gpu("a", 1000, 600, 200, strangers), Gpu("b", problem="lost")]).decode())
    figures = {
        name: value(found, f"gpu_{name}", gpu="a") for name in ("up", "total_bytes", "used_bytes", "cached_bytes")
    }
    assert figures == {"up": 1, "total_bytes": 1000, "used_bytes": 600, "cached_bytes": 200}
    assert value(found, "gpu_unexplained_bytes", gpu="a") == 300
    assert value(found, "gpu_unexplained_processes", gpu="a") == 2
    assert value(found, "gpu_untold_processes", gpu="a") == 1
    assert (value(found, "gpu_up", gpu="b"), value(found, "gpu_used_bytes", gpu="b")) == (0, None)
    assert "gpu_" not in render([]).decode()


def test_an_engine_whose_weights_were_given_up_is_seen_by_the_exporter(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a leased engine to one that goes on with memory which no daemon holds any more."""
    for name, text in fake_cuda.environment.items():
        monkeypatch.setenv(name, text)
    uuid = fake_cuda.devices[0].uuid
    with exporter(runtime_dir) as site, gpu_daemon(fake_cuda, model, runtime_dir) as served:
        report = served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            engine.ask("take_a_context")
            found = site.metrics()
            assert value(found, "gpu_cached_bytes", gpu=uuid) == report.resident_nbytes
            assert value(found, "gpu_used_bytes", gpu=uuid) == report.resident_nbytes + CONTEXT_NBYTES
            assert value(found, "gpu_unexplained_processes", gpu=uuid) == 0
            assert served.stop() == 0
            found = site.metrics()
            assert value(found, "gpu_used_bytes", gpu=uuid) == report.resident_nbytes + CONTEXT_NBYTES
            assert value(found, "gpu_cached_bytes", gpu=uuid) == 0
            assert value(found, "gpu_unexplained_processes", gpu=uuid) == 1
            assert value(found, "gpu_unexplained_bytes", gpu=uuid) == CONTEXT_NBYTES
            [gpu] = json.loads(site.ask("/status.json").text)["gpus"]
            assert [one["pid"] for one in gpu["unexplained_processes"]] == [engine.pid]
