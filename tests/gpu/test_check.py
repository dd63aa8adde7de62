"""The check of a real GPU, rehearsed: each row against the driver that needs no GPU, and each kind of failure."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import lifetimes, listing, row, runner
from tests.gpu.row import Outcome, Row, Setting, run
from tests.support.fakecuda import FakeDevice
from tests.support.unprivileged import ROOT
from weightcached.protocol.memory.cuda import devices, physical
from weightcached.protocol.memory.cuda.context import Context

CHECK = Path(__file__).with_name("check.py")
LACKING = {
    "allocator": "has no CUDA",
    "graph": "has no CUDA",
    "straight": "kvikio cannot be imported",
    "vllm": "vllm is not installed",
}


def checked(fake_cuda, *arguments, timeout_s=240, **variables):
    """The command's (exit status, {row: (verdict, what it said)}), and all it wrote. No row is tried twice."""
    environment = {**os.environ, **fake_cuda.environment, "PROBE_SETTLING_S": "1", **variables}
    command = [sys.executable, str(CHECK), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    lines = ended.stdout.splitlines()
    tried = [
        (line.split()[1], (line.split()[0], said.strip()))
        for line, said in itertools.pairwise(lines)
        if line.startswith(("PASS ", "FAIL ", "SKIPPED "))
    ]
    verdicts = dict(tried)
    assert len(verdicts) == len(tried), ended.stdout
    return ended.returncode, verdicts, ended.stdout + ended.stderr


def test_the_readme_tells_of_every_row_in_the_order_in_which_they_are_tried():
    told = re.findall(r"^\| `([\w-]+)` \|", CHECK.with_name("README.md").read_text(), re.MULTILINE)
    assert told == [row.name for row in runner.ROWS]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_one_command_rehearses_every_row_in_order_and_they_pass_or_say_what_they_lack(fake_cuda):
    """As it will be run on a device, with more time: a busy machine is not a bug."""
    status, verdicts, written = checked(fake_cuda, "--within", "600", timeout_s=650)
    assert status == 0, written
    assert list(verdicts) == [row.name for row in runner.ROWS]
    assert {name for name, (verdict, _) in verdicts.items() if verdict == "SKIPPED"} == LACKING.keys(), written
    assert all(said for _, said in verdicts.values()), written
    for name, lacks in LACKING.items():
        assert lacks in verdicts[name][1]
    assert "REHEARSED against a fake driver" in written
    assert "driver 0.0 (fake)" in written
    assert not runner.RESULTS.exists() or "Fake GPU" not in runner.RESULTS.read_text()


@pytest.mark.parametrize(
    ("worse", "name"),
    [
        ("unprotected", "read-only"),
        ("forgetful", "descriptor"),
        ("forgetful", "probe"),
        ("hoarding", "probe"),
        pytest.param("forgetful", "vault", marks=pytest.mark.slow),
    ],
)
def test_a_device_that_does_not_keep_its_promises_fails_the_row(fake_cuda, worse, name):
    fake_cuda.worsen(worse)
    status, verdicts, written = checked(fake_cuda, "--row", name)
    assert status == 1, written
    assert verdicts[name][0] == "FAIL"


@pytest.mark.parametrize("name", ["context", pytest.param("kept", marks=pytest.mark.slow)])
def test_where_nvml_lists_no_process_of_ours_the_row_says_so_and_rests_on_the_memory(fake_cuda, name):
    fake_cuda.worsen("other-pids")
    status, verdicts, written = checked(fake_cuda, "--row", name)
    assert status == 0, written
    assert "only the memory in use says" in verdicts[name][1]


@pytest.mark.slow
def test_the_holder_is_found_without_nvml_whose_pids_may_be_strangers(fake_cuda):
    fake_cuda.worsen("other-pids")
    status, verdicts, written = checked(fake_cuda, "--row", "holder")
    assert status == 0, written
    assert verdicts["holder"][0] == "PASS"


def test_who_has_a_context_is_seen_where_nvml_lists_it(cuda_here, monkeypatch):
    for name, value in {**cuda_here.fake.environment, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    setting = Setting(cuda_here.fake.devices[0].uuid, "", rehearsal=True, alone=False)
    assert "and not the keeper" in listing.without_context(setting, os.getpid(), who="the keeper")
    with Context(devices.find(None)), pytest.raises(AssertionError, match="the keeper has a context"):
        listing.without_context(setting, os.getpid(), who="the keeper")


def test_a_kernel_that_writes_where_it_may_only_read_fails_the_row_though_copies_do_not(fake_cuda, monkeypatch):
    """In a rehearsal the kernel is the host's: it dies of the write unless the mapping is not protected."""
    monkeypatch.setattr(lifetimes, "SPOILERS", {"spoil-by-kernel": "kernel"})
    for name, value in {**fake_cuda.environment, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    setting = Setting(fake_cuda.devices[0].uuid, "", rehearsal=True, alone=False)
    assert lifetimes.read_only(setting) == f"kernel: the process that wrote died (status {-signal.SIGSEGV})"
    fake_cuda.worsen("unprotected")
    with pytest.raises(AssertionError, match=r"went through \(spoil-by-kernel\)"):
        lifetimes.read_only(setting)


def test_results_are_kept_with_date_device_and_driver_run_after_run_and_never_those_of_a_rehearsal(
    cuda_here, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(runner, "RESULTS", kept := tmp_path / "RESULTS.md")
    monkeypatch.setattr(runner, "run", lambda row, *_, **__: Outcome(row.name, row.claim, "PASS", f"9 ms | {row.name}"))
    assert runner.main(["--row", "map"]) == 0
    assert "REHEARSED" in capsys.readouterr().out
    assert not kept.exists()
    monkeypatch.setattr(runner, "rehearsed", lambda: False)
    assert runner.main(["--row", "map", "--within", "0"]) == 1
    assert runner.main(["--row", "map", "--row", "open"]) == 0
    title, _, first, *lines = kept.read_text().splitlines()
    second = lines[5]
    assert title == "# What was seen on GPUs"
    for head in (first, second):
        date = time.strftime("%Y-%m-%d")
        assert head.startswith(f"## {date} ")
        assert "Fake GPU (0 GiB), driver 0.0 (fake), CUDA 13.0, " in head
    assert lines[3].startswith("| FAIL | map | mapping a segment takes milliseconds, whatever its size | not reached")
    assert [line.split(" | ")[-1] for line in lines[9:]] == ["9 ms / map |", "9 ms / open |"]


def test_a_driver_whose_version_nvml_does_not_tell_is_no_reason_to_stop(cuda_here):
    assert runner.driver_version() == "0.0 (fake)"
    cuda_here.fake.fail(("nvmlSystemGetDriverVersion", "*", 3))
    assert runner.driver_version() == "unknown (nvmlReturn 3)"


def test_a_call_that_fails_fails_the_row_by_name_and_the_others_go_on(fake_cuda):
    status, verdicts, _ = checked(fake_cuda, "--row", "bytes", "--row", "map", FAKECUDA_FAIL="cuMemcpyHtoDAsync 40 999")
    assert status == 1
    assert verdicts["bytes"][0] == "FAIL"
    assert "cuMemcpyHtoDAsync" in verdicts["bytes"][1]
    assert verdicts["map"][0] == "PASS"


def test_memory_that_stays_used_after_a_row_fails_it(cuda_here, monkeypatch):
    held = []

    def leaves_some(row, setting, *, within_s):
        device = devices.find(None)
        held.append(physical.allocate(physical.granularity(device), device=device))
        return Outcome(row.name, row.claim, "PASS", "all well")

    monkeypatch.setattr(runner, "run", leaves_some)
    monkeypatch.setattr(runner, "SETTLES_S", 0.0)
    setting = Setting(cuda_here.fake.devices[0].uuid, "", rehearsal=True, alone=False)
    outcome = runner._accounted(Row("any", "claims something", lambda _: ""), setting, until_s=math.inf)
    held.pop().close()
    assert outcome.verdict == "FAIL"
    assert "stay used" in outcome.said
    assert "all well" in outcome.said


def test_a_target_that_is_missed_fails_the_row_and_costs_it_none_of_its_figures():
    real, rehearsed = (Setting("", "", rehearsal=rehearsal, alone=False) for rehearsal in (False, True))
    assert real.judged(["21 ms", "4 GB/s"], {"30 ms at most": True}) == "21 ms; 4 GB/s; 30 ms at most"
    with pytest.raises(AssertionError, match="21 ms; 4 GB/s; MISSED: 20 ms at most; 3 GB/s at least"):
        real.judged(["21 ms", "4 GB/s"], {"20 ms at most": False, "3 GB/s at least": True})
    assert rehearsed.judged(["21 ms"], {"20 ms at most": False}) == "21 ms; 20 ms at most: not judged in a rehearsal"


def test_a_row_that_does_not_end_is_killed_with_all_it_started_and_has_failed(monkeypatch):
    """Whoever it started has its output, which is read to the end."""
    monkeypatch.setattr(row, "_command", lambda *_: ["sh", "-c", "sleep 100 & wait"])
    started_s = time.monotonic()
    never = Row("any", "never ends", lambda _: "", deadline_s=1)
    outcome = run(never, Setting("", "", rehearsal=True, alone=False))
    assert time.monotonic() - started_s < 50
    assert outcome.verdict == "FAIL"
    assert outcome.said == "not done after 1 s"


def test_all_rows_together_end_in_time_and_those_not_reached_have_failed(fake_cuda):
    """The first is killed when the time is up, and nothing of it is left on the device, as the fixture looks for."""
    status, verdicts, written = checked(fake_cuda, "--within", "0.2", *("--row", "descriptor"), *("--row", "map"))
    assert status == 1, written
    assert list(verdicts) == ["descriptor", "map"]
    assert verdicts["descriptor"] == ("FAIL", "not done after 0 s")
    assert verdicts["map"][0] == "FAIL"
    assert verdicts["map"][1].startswith("not reached")
    assert runner.WITHIN_S < 300


def test_of_several_devices_the_one_that_is_named_is_checked(fake_cuda):
    fake_cuda.plug(FakeDevice(), other := FakeDevice(name="Other GPU"))
    status, _, written = checked(fake_cuda, "--row", "map", "--device", other.uuid)
    assert status == 0, written
    assert "Other GPU" in written


def test_without_a_device_there_is_nothing_to_check(fake_cuda):
    fake_cuda.plug()
    status, verdicts, written = checked(fake_cuda)
    assert (status, verdicts) == (2, {})
    assert "there is no device to check" in written
