"""Weights on a GPU from end to end, with real daemons, workers and engines, on the driver that needs no GPU.

It stands for what the driver is told and for whose memory lives how long (tests/support/fakecuda.py), not for a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import REAL, Daemon, start
from tests.support.eventually import eventually
from tests.support.fakecuda import GRANULARITY, INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN, CudaHere, FakeCuda, FakeDevice
from tests.support.gpu_daemons import digests_from_disk, gpu_daemon, place_of
from tests.support.gpu_engine import gpu_engine
from tests.support.manager import Manager
from tests.support.unprivileged import ROOT
from weightcached.daemon import cli
from weightcached.daemon.holdings import Holdings
from weightcached.daemon.listen_fds import HandedOver
from weightcached.daemon.state_record import NBYTES as STATE_NBYTES
from weightcached.daemon.wait import wait
from weightcached.protocol.command_line import USAGE_EXIT
from weightcached.protocol.config import abbreviated, build_config
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host, names
from weightcached.protocol.memory.cuda import physical
from weightcached.protocol.peers import AllowList


def test_engines_get_the_checkpoint_bit_for_bit_and_the_keeper_has_no_context(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    expected = digests_from_disk(model)
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        report = served.wait_until("ready")
        assert report.memory == "cuda-vmm"
        assert fake_cuda.used_nbytes() == report.resident_nbytes
        assert report.resident_nbytes % GRANULARITY == 0
        assert fake_cuda.contexts() == []
        with (
            gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as one,
            gpu_engine(fake_cuda, model, runtime_dir, device="cuda:0") as other,
        ):
            for engine in (one, other):
                attached = engine.answer()
                assert (attached["source"], attached["resident_bytes"]) == ("daemon", report.resident_nbytes)
                assert engine.ask("digests") == expected
                assert engine.ask("differing") == []
            assert fake_cuda.used_nbytes() == report.resident_nbytes  # one copy, however many engines
            assert "cannot address" in one.ask("host_bytes")
        assert "cuCtxPushCurrent" not in fake_cuda.calls(served.pid)
        assert "cuMemMap" not in fake_cuda.calls(served.pid)
        maps = Path(f"/proc/{served.pid}/maps").read_text()
        assert [name for name in ("libcuda.so.1", "torch", "numpy") if name in maps] == ["libcuda.so.1"]
        assert served.report().own_memory_nbytes < 64 << 20


def test_engines_keep_their_weights_when_the_keeper_is_killed(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            before = engine.ask("digests")
            os.kill(served.pid, signal.SIGKILL)
            served.process.wait()
            assert engine.ask("digests") == before
            assert fake_cuda.used_nbytes() > 0
    assert fake_cuda.used_nbytes() == 0


def test_a_restarted_keeper_adopts_and_engines_resume_their_leases(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, "--verify-on-adopt", supervised=True) as served:
        first = served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda", heartbeat_s=0.2) as engine:
            attached = engine.answer()
            before = engine.ask("digests")
            seen = len(served.log.lines)
            served.kill_keeper()
            again = served.wait_ready_again(seen)
            assert (again.generation, again.bytes_read, again.adoptions) == (first.generation, 0, 1)
            assert engine.ask("digests") == before
            with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as late:
                assert late.answer()["generation"] == attached["generation"]
                assert late.ask("digests") == before
            assert fake_cuda.used_nbytes() == first.resident_nbytes
    assert fake_cuda.used_nbytes() == 0


def test_the_vault_alone_keeps_the_memory(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        first = served.wait_until("ready")
        os.kill(first.pid, signal.SIGSTOP)
        seen = len(served.log.lines)
        os.kill(first.pid, signal.SIGKILL)
        assert served.wait_ready_again(seen).generation == first.generation
        assert fake_cuda.used_nbytes() == first.resident_nbytes


def test_sleep_and_wake_at_the_same_addresses_also_when_the_daemon_is_gone(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            before, addresses = engine.ask("digests"), engine.ask("addresses")
            engine.ask("unmap")
            served.stop(signal.SIGKILL)
            engine.ask("remap")
            assert (engine.ask("digests"), engine.ask("addresses")) == (before, addresses)
    assert fake_cuda.used_nbytes() == 0


def test_tensors_outlive_their_set_and_then_nothing_is_left(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            engine.ask("tensors_outlive_the_set")
    assert fake_cuda.leaks() == {}


def test_what_an_engine_writes_to_is_a_copy_and_a_store_to_the_weights_ends_it_alone(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    """Copies and buffers are the engine's own, everything that it has mapped is read-only, and others read on."""
    expected = digests_from_disk(model)
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        with (
            gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as other,
            gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine,
        ):
            other.answer()
            names = engine.answer()["names"]
            assert engine.ask("copies_written_to") == 2 * names
            shared, own = engine.ask("bind_with_buffers")
            assert (shared + own, own > 1) == (names, True)
            assert engine.ask("digests") == expected
            maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
            seen = {line.split()[1] for line in maps if f"{fake_cuda.directory}/memory/" in line}
            assert seen == {"---s", "r--s"}  # handles, and what is mapped
            with pytest.raises(AssertionError, match=f"ended with -{signal.SIGSEGV:d}"):
                engine.ask("write")
            assert other.ask("digests") == expected
            assert other.ask("differing") == []
            eventually(lambda: served.report().lease_count == 1)
    assert fake_cuda.used_nbytes() == 0


def test_daemon_and_engine_meet_by_uuid_whatever_their_tables_say(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    first, second = FakeDevice(), FakeDevice()
    fake_cuda.plug(first, second)
    with gpu_daemon(fake_cuda, model, runtime_dir, device=1, CUDA_VISIBLE_DEVICES="1,0") as served:
        served.wait_until("ready")
        assert fake_cuda.used_nbytes(second.uuid) > 0
        assert fake_cuda.used_nbytes(first.uuid) == 0
        seen = [("0,1", "cuda:1"), ("1", "cuda"), (f"GPU-{second.uuid[:8]}", "cuda:0"), (f"GPU-{second.uuid}", "cuda")]
        for visible, device in seen:
            with gpu_engine(
                fake_cuda,
                model,
                runtime_dir,
                device=device,
                mode="require",
                environment={"CUDA_VISIBLE_DEVICES": visible},
            ) as engine:
                assert engine.answer()["source"] == "daemon"
                assert engine.ask("differing") == []
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda:0", mode="require") as engine:
            assert engine.error()["code"] == "daemon_absent"


@pytest.mark.parametrize(
    ("memory", "word", "variables"),
    [
        ("cuda-vmm", "cuda:0", {}),  # the fastest comes first
        ("cuda-ipc", "cuda", {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ("cuda-vmm", "cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}),
    ],
)
def test_a_daemon_is_told_its_gpu_by_its_own_table_and_an_engine_by_another(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, memory: str, word: str, variables: dict[str, Any]
) -> None:
    """Keeper, worker and holder take the same one, whatever its number, and so does an engine with other numbers."""
    slow, fast = (FakeDevice(f"{letter * 8}-0000-4000-8000-000000000001", speed=1 + (letter == "b")) for letter in "ab")
    fake_cuda.plug(slow, fast)
    with gpu_daemon(
        fake_cuda, model, runtime_dir, "--device", word, "--memory", memory, device=1, **variables
    ) as served:
        report = served.wait_until("ready")
        assert [fake_cuda.used_nbytes(one.uuid) for one in (slow, fast)] == [0, report.resident_nbytes]
        others = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        with gpu_engine(
            fake_cuda, model, runtime_dir, device="cuda:1", memory=memory, mode="require", environment=others
        ) as engine:
            assert engine.answer()["source"] == "daemon"
            assert engine.ask("differing") == []


def test_daemon_and_engine_meet_on_a_mig_instance(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    """It is a device like any other, under each of its spellings, and has the room that is its own."""
    whole, instance, full = FakeDevice(), FakeDevice(mig=True), FakeDevice(mig=True, nbytes=GRANULARITY // 2)
    fake_cuda.plug(whole, instance, full)
    named = ("--device", f"cuda:MIG-{instance.uuid}")
    visible: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": f"MIG-{instance.uuid}"}
    with gpu_daemon(fake_cuda, model, runtime_dir, *named, device=1, **visible) as served:
        report = served.wait_until("ready")
        assert [fake_cuda.used_nbytes(one.uuid) for one in fake_cuda.devices] == [0, report.resident_nbytes, 0]
        seen: list[tuple[str, dict[str, str]]] = [
            ("cuda", visible),
            (f"cuda:MIG-{instance.uuid}", {}),
            (f"cuda:MIG-{instance.uuid[:8]}", {}),
            ("cuda:1", {"CUDA_VISIBLE_DEVICES": f"MIG-{full.uuid},MIG-{instance.uuid[:8]}"}),
        ]
        for device, environment in seen:
            with gpu_engine(
                fake_cuda, model, runtime_dir, device=device, mode="require", environment=environment
            ) as engine:
                assert engine.answer()["source"] == "daemon"
                assert engine.ask("differing") == []
        with gpu_engine(fake_cuda, model, runtime_dir, device=f"cuda:{whole.uuid}", mode="require") as engine:
            assert engine.error()["code"] == "daemon_absent"
        with gpu_daemon(fake_cuda, model, runtime_dir, device=2) as other:
            failed = str(other.wait_until("failed").last_error)
            assert f"on {full.uuid}" in failed
            assert "1 of 1 MiB free" in failed


def test_a_socket_of_another_gpu_is_a_mismatch_that_names_the_device(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    first, second = FakeDevice(), FakeDevice()
    fake_cuda.plug(first, second)
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        os.link(place_of(first, runtime_dir).socket_path, place_of(second, runtime_dir).socket_path)
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda:1") as engine:
            error = engine.error()
        assert error["code"] == "config_mismatch"
        assert f"device: daemon has 'gpu-{first.uuid}'" in str(error["found"])
        os.unlink(place_of(second, runtime_dir).socket_path)


def test_a_full_gpu_is_an_error_that_says_who_holds_it(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    fake_cuda.plug(FakeDevice(nbytes=GRANULARITY // 2))
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        report = served.wait_until("failed")
        assert "insufficient_memory" in str(report.last_error) or "no room" in str(report.last_error)
        assert "MiB free; held by" in str(report.last_error)
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            assert engine.error()["code"] == "daemon_failed"


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemcpyHtoDAsync_v2"])
def test_a_driver_that_fails_while_loading_is_reported_and_leaves_nothing(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, call: str
) -> None:
    fake_cuda.fail((call, "*", UNKNOWN), (call.removesuffix("_v2"), "*", UNKNOWN))
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        report = served.wait_until("failed")
        assert call.removesuffix("_v2") in str(report.last_error)
        assert fake_cuda.used_nbytes() == 0
    assert fake_cuda.contexts() == []


def test_an_engine_whose_driver_fails_has_an_error_and_the_daemon_goes_on(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_until("ready")
        for call in ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
            with gpu_engine(
                fake_cuda, model, runtime_dir, device="cuda", environment={"FAKECUDA_FAIL": f"{call} * {UNKNOWN}"}
            ) as engine:
                error = engine.error()
                assert (error["code"], call in str(error)) == ("device_failed", True)
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            assert engine.answer()["source"] == "daemon"
        assert served.report().lease_count == 0


def test_a_load_that_fails_for_a_moment_is_tried_again_in_other_memory(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    fake_cuda.fail(("cuMemHostAlloc", "*", OUT_OF_MEMORY))
    with gpu_daemon(fake_cuda, model, runtime_dir) as served:
        served.wait_logged("loading again")
        fake_cuda.fail()
        report = served.wait_until("ready")
        assert fake_cuda.used_nbytes() == report.resident_nbytes


def test_a_killed_worker_leaves_no_memory_of_its_own(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, "--log-level", "debug") as served:
        os.kill(served.wait_logged("child started", child="worker")["child_pid"], signal.SIGKILL)
        served.wait_logged("loading again")
        report = served.wait_until("ready")
        assert fake_cuda.used_nbytes() == report.resident_nbytes


def test_weights_that_are_given_up_are_gone_from_the_gpu_and_the_socket_with_them(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        served.wait_until("ready")
        assert cli.main(["release", "--runtime-dir", str(runtime_dir)]) == 0
        assert fake_cuda.used_nbytes() == 0
        assert not served.place.socket_path.exists()
        assert served.process.wait(60) == 0


def test_a_driver_that_fails_at_adoption_costs_no_kept_weights(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        first = served.wait_until("ready")
        fake_cuda.fail(("cuInit", "*", UNKNOWN))
        seen = len(served.log.lines)
        served.kill_keeper()
        served.wait_logged("state", state="failed", first=seen)
        assert fake_cuda.used_nbytes() == first.resident_nbytes
        fake_cuda.fail()
        seen = len(served.log.lines)
        served.kill_keeper()
        assert served.wait_ready_again(seen).generation == first.generation


def test_without_its_record_an_adopted_grant_still_says_what_the_gpu_holds_for_it(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    """The record knows the pages; the manifest knows the segments' bytes, of which the last page is not full."""
    device = fake_cuda.devices[0]
    config = build_config(model, layout="hf", tp_size=1, tp_rank=0, memory="cuda-vmm", device=f"gpu-{device.uuid}")

    def resident_nbytes(served: Daemon) -> tuple[int, int]:
        served.place = place_of(device, runtime_dir)
        report = served.wait_until("ready")
        grant, fds = served.attach(want="current", config=abbreviated(config.entries()), fingerprint=config.fingerprint)
        fds.close()
        assert sum(one.nbytes for one in grant.segments) < grant.resident_nbytes == fake_cuda.used_nbytes()
        return report.pid, report.resident_nbytes

    with Manager(runtime_dir.parent) as manager:
        given: dict[str, Any] = {"environment": fake_cuda.environment, "real": True}
        first = manager.start(model, runtime_dir, "--device", f"cuda:{device.uuid}", **given)
        try:
            pid, before = resident_nbytes(first)
        finally:
            first.stop(signal.SIGKILL)
        os.pwrite(manager.fd("state"), bytes(STATE_NBYTES), 0)
        again = manager.start(model, runtime_dir, "--device", f"cuda:{device.uuid}", **given)
        try:
            assert resident_nbytes(again) == (again.pid, before)
            assert (again.pid != pid, again.report().adoptions, again.report().proven) == (True, 1, False)
        finally:
            again.stop(signal.SIGKILL)
    assert fake_cuda.used_nbytes() == 0


@pytest.mark.parametrize(
    ("call", "result", "code"),
    [
        ("cuMemImportFromShareableHandle", INVALID_VALUE, "transfer"),
        ("cuMemGetAllocationPropertiesFromHandle", UNKNOWN, "device_failed"),
    ],
)
def test_a_segment_that_cannot_be_shown_to_be_this_devices_is_not_adopted(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, call: str, result: int, code: str
) -> None:
    with gpu_daemon(fake_cuda, model, runtime_dir, supervised=True) as served:
        first = served.wait_until("ready")
        fake_cuda.fail((call, "*", result))
        seen = len(served.log.lines)
        served.kill_keeper()
        said = served.wait_logged("not adopted", first=seen)
        assert (said["code"], call in said["reason"]) == (code, True)
        fake_cuda.fail()  # long before the worker comes to its segment: it has to start first
        again = served.wait_ready_again(seen)
        assert again.generation != first.generation
        assert again.adoption_refusals == {code: 1}
        assert fake_cuda.used_nbytes() == again.resident_nbytes


def test_what_only_a_name_tells_of_takes_the_place_of_no_segment(fake_cuda: FakeCuda) -> None:
    generation = "1" * 32
    kept = [
        host.allocate(1, name=names.manifest_name(generation)),
        host.allocate(1, name=names.segment_name(generation, 0)),
    ]
    devices = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for _ in range(4)]
    called = [f"g{generation}.{part}" for part in ("s0", "s1", "s1", "m")]
    fds = [*devices[:2], *kept, *devices[2:]]
    holdings = Holdings.of(
        HandedOver((*called[:2], f"g{generation}.m", f"g{generation}.s0", *called[2:]), OwnedFds(fds))
    )
    parts = holdings.generations[generation]
    assert parts.problem is None
    assert parts.segments == {0: kept[1], 1: devices[1]}
    assert [fd for _, fd in holdings.strangers] == [devices[0], devices[2], devices[3]]
    holdings.close()


def test_up_puts_each_rank_on_a_gpu_of_its_own(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    fake_cuda.plug(FakeDevice(), FakeDevice())
    words = ["up", "--model", str(model), "--runtime-dir", str(runtime_dir), "--layout", "fused", "--tp-size", "2"]
    words += ["--device", "cuda", "--cache-dir", str(tmp_path)]
    # Known before: or one rank may have it, and the other still its receipts, when engines look.
    subprocess.run([*REAL, "digest", str(model), "--cache-dir", str(tmp_path)], cwd=ROOT, check=True)
    process = subprocess.Popen(
        [*REAL, *words],
        cwd=ROOT,
        env={**os.environ, **fake_cuda.environment},
        stderr=subprocess.DEVNULL,
    )
    try:
        places = [place_of(device, runtime_dir) for device in fake_cuda.devices]
        wait(lambda: places, allowed=AllowList(), deadline=Deadline.after(60))
        assert all(fake_cuda.used_nbytes(device.uuid) > 0 for device in fake_cuda.devices)
        verify = [*REAL, "verify", str(model), "--runtime-dir", str(runtime_dir), "--layout", "fused", "--tp-size", "2"]
        verify += ["--device", "cuda", "--json"]
        answer = subprocess.run(verify, cwd=ROOT, env={**os.environ, **fake_cuda.environment}, stdout=subprocess.PIPE)
        assert answer.returncode == 0
        assert [rank["rank"] for rank in json.loads(answer.stdout)["ranks"]] == ["tp0of2", "tp1of2"]
        versions = set()
        for rank in range(2):
            with gpu_engine(
                fake_cuda, model, runtime_dir, device=f"cuda:{rank}", layout="fused", tp_size=2, tp_rank=rank
            ) as engine:
                versions.add(engine.answer()["version"])
        assert len(versions) == 1
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_up_puts_no_two_ranks_on_one_gpu(
    cuda_here: CudaHere, model: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["up", "--model", str(model), "--runtime-dir", str(runtime_dir), "--layout", "fused", "--tp-size", "2"]
    assert cli.main([*words, "--device", "cuda:0"]) == USAGE_EXIT
    assert "ranks 0 and 1 would be at one place" in capsys.readouterr().err
    assert cli.main([*words, "--device", "cuda"]) == USAGE_EXIT
    assert "does not see the device" in capsys.readouterr().err


def test_a_snapshot_of_host_memory_is_loaded_onto_a_gpu(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    saved = ["snapshot", "save", str(model), str(tmp_path), "--mode", "off", "--runtime-dir", str(runtime_dir)]
    assert cli.main([*saved, "--cache-dir", str(tmp_path / "digests")]) == 0
    with gpu_daemon(fake_cuda, model, runtime_dir, "--snapshot", str(tmp_path)) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
            engine.answer()
            assert engine.ask("digests") == digests_from_disk(model)


def test_the_keepers_way_to_a_gpu_imports_neither_torch_nor_numpy(fake_cuda: FakeCuda) -> None:
    program = (
        "import os, sys\n"
        "from weightcached.protocol.memory.cuda_vmm import CudaVmm\n"
        f"kind = CudaVmm({fake_cuda.devices[0].uuid!r})\n"
        "kind.admit(1)\n"
        "fd = kind.allocate(1, name='test')\n"
        "kind.verify(fd, nbytes=1, what='it')\n"
        "os.close(fd)\n"
        "print({'torch', 'numpy'} & set(sys.modules))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **fake_cuda.environment}, capture_output=True, text=True
    )
    assert (answer.stdout, answer.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    ("options", "bound_first"),
    [("--device cuda:{} --memory cuda-vmm", True), ("--device cuda:{}", True), ("--device cuda", False)],
)
def test_the_driver_waits_for_the_socket_where_the_uuid_is_given_and_else_names_it(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, options: str, bound_first: bool
) -> None:
    """Python says what it imports, in the order of the log. (What the worker says there, the log quotes.)"""
    [device] = fake_cuda.devices
    environment = fake_cuda.environment | {"PYTHONPROFILEIMPORTTIME": "1"}
    served = start(model, runtime_dir, *options.format(device.uuid).split(), environment=environment)
    try:
        served.place = place_of(device, runtime_dir)
        assert served.wait_until("ready").memory == "cuda-vmm"
    finally:
        served.stop()
    lines = served.log.lines
    [listening] = [number for number, line in enumerate(lines) if '"message": "listening"' in line]
    imported = [number for number, line in enumerate(lines) if line.startswith("import time:") and " cuda." in line]
    assert {listening < number for number in imported} == {bound_first}
    assert not {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"} & set(fake_cuda.calls(served.pid))


def test_a_driver_that_does_not_answer_keeps_nobody_from_the_socket(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    """Which kind of memory it is has yet to be said by the driver; engines wait, and a daemon that is to stop does."""
    [device] = fake_cuda.devices

    def started() -> Daemon:
        served = start(model, runtime_dir, "--device", f"cuda:{device.uuid}", environment=fake_cuda.environment)
        served.place = place_of(device, runtime_dir)
        eventually(lambda: "cuInit" in fake_cuda.calls(served.pid))
        report = served.report()
        assert (report.state, report.memory) == ("starting", "unknown")
        return served

    with fake_cuda.held("cuInit"):
        assert started().stop() == 0
        served = started()
    try:
        assert served.wait_until("ready").memory == "cuda-vmm"
    finally:
        served.stop()


@pytest.mark.parametrize("lacks", ["the driver", "the device"])
def test_engines_are_told_that_a_gpu_called_by_its_uuid_is_not_there(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path, lacks: str
) -> None:
    [device] = fake_cuda.devices
    if lacks == "the driver":
        fake_cuda.fail(("cuInit", "*", UNKNOWN))
    else:
        fake_cuda.plug(FakeDevice())
    served = start(model, runtime_dir, "--device", f"cuda:{device.uuid}", environment=fake_cuda.environment)
    served.place = place_of(device, runtime_dir)
    try:
        served.wait_until("failed")
        assert "cannot be asked yet" in served.wait_logged("memory kind", memory="cuda-vmm")["reason"]
        with gpu_engine(
            fake_cuda, model, runtime_dir, device=f"cuda:{device.uuid}", memory="cuda-vmm", mode="require"
        ) as engine:
            error = engine.error()
            assert error["code"] == "daemon_failed"
            assert ("cuInit failed" if lacks == "the driver" else "does not see the device") in str(error)
    finally:
        assert served.stop() == 0


def test_without_a_daemon_the_disk_fills_memory_of_the_engines_own(
    fake_cuda: FakeCuda, model: Path, runtime_dir: Path
) -> None:
    expected = digests_from_disk(model)
    with gpu_engine(fake_cuda, model, runtime_dir, device="cuda") as engine:
        attached = engine.answer()
        assert attached["source"] == "disk"
        assert engine.ask("digests") == expected
        assert fake_cuda.used_nbytes() == attached["resident_bytes"]
    assert fake_cuda.used_nbytes() == 0


def test_a_gpu_that_is_not_there_is_said_at_the_start(fake_cuda: FakeCuda, model: Path, runtime_dir: Path) -> None:
    served = start(model, runtime_dir, "--device", "cuda:7", environment=fake_cuda.environment)
    assert served.process.wait(60) == 1
    served.log.join()
    assert "does not see the device" in served.log.lines[-1]


def test_a_shard_in_several_segments_is_served_verified_adopted_and_resumed(
    fake_cuda: FakeCuda, large_model: Path, runtime_dir: Path
) -> None:
    """The whole life where one allocation may be a page at most: each segment is one descriptor in grant and vault."""
    limit: dict[str, Any] = {physical.LARGEST_VARIABLE: str(GRANULARITY)}
    expected = digests_from_disk(large_model)
    with gpu_daemon(fake_cuda, large_model, runtime_dir, "--verify-on-adopt", supervised=True, **limit) as served:
        first = served.wait_until("ready")
        segments = len(fake_cuda.memory())
        assert segments > 2
        assert first.resident_nbytes == segments * GRANULARITY == fake_cuda.used_nbytes()
        with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda") as engine:
            assert engine.answer()["resident_bytes"] == first.resident_nbytes
            assert engine.ask("digests") == expected
            assert engine.ask("differing") == []
            verified = ["verify", str(large_model), "--runtime-dir", str(runtime_dir), "--device", "cuda", "--json"]
            answer = subprocess.run(
                [*REAL, *verified], cwd=ROOT, env={**os.environ, **fake_cuda.environment}, stdout=subprocess.PIPE
            )
            assert answer.returncode == 0
            addresses = engine.ask("addresses")
            seen = len(served.log.lines)
            served.kill_keeper()
            again = served.wait_ready_again(seen)
            assert (again.generation, again.bytes_read, again.adoptions) == (first.generation, 0, 1)
            served.wait_logged("verified", first=seen)
            engine.ask("unmap")
            engine.ask("remap")
            assert engine.ask("addresses") == addresses
            assert engine.ask("digests") == expected
        with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda") as engine:
            engine.answer()
            assert engine.ask("digests") == expected
        assert fake_cuda.used_nbytes() == first.resident_nbytes
    with gpu_engine(fake_cuda, large_model, runtime_dir.parent / "none", device="cuda", environment=limit) as engine:
        assert engine.answer() | {"generation": "", "version": ""} == {
            "source": "disk",
            "generation": "",
            "version": "",
            "resident_bytes": first.resident_nbytes,
            "names": len(expected),
        }
        assert engine.ask("digests") == expected


def test_a_parameter_that_no_segment_holds_fails_the_load_for_good_and_is_named(
    fake_cuda: FakeCuda, runtime_dir: Path, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path, hidden_size=256, vocab_size=8192)
    limit: dict[str, Any] = {physical.LARGEST_VARIABLE: str(GRANULARITY)}
    with gpu_daemon(fake_cuda, model, runtime_dir, **limit) as served:
        report = served.wait_until("failed")
        assert "lm_head.weight is larger than a segment" in str(report.last_error)
        assert fake_cuda.used_nbytes() == 0


def test_a_daemon_reads_past_the_host_where_it_is_told_to_and_can(
    fake_cuda: FakeCuda, large_model: Path, runtime_dir: Path
) -> None:
    """With a stand-in for kvikio (tests/fakekvikio); without one, what was asked for is an error."""
    asked = ("--load-strategy", "gds")
    with gpu_daemon(fake_cuda, large_model, runtime_dir, *asked) as served:
        report = served.wait_until("failed")
        assert "kvikio cannot be imported" in str(report.last_error)
    with gpu_daemon(
        fake_cuda, large_model, runtime_dir, *asked, PYTHONPATH=str(ROOT / "tests" / "fakekvikio")
    ) as served:
        served.wait_until("ready")
        with gpu_engine(fake_cuda, large_model, runtime_dir, device="cuda") as engine:
            engine.answer()
            assert engine.ask("digests") == digests_from_disk(large_model)
            assert engine.ask("differing") == []
