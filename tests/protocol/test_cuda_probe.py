"""The probe for a real GPU, rehearsed: it passes where a descriptor keeps the memory, and fails otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.eventually import eventually
from weightcached.protocol.memory.cuda import devices, physical

PROBE = Path(__file__).parents[1] / "gpu" / "probe.py"


def probe(fake_cuda, *, spare_nbytes: int = 0) -> subprocess.CompletedProcess[str]:
    """With as little memory as the fake device has, and without waiting for what does not come."""
    small = {"PROBE_NBYTES": str(8 << 20), "PROBE_SPARE_NBYTES": str(spare_nbytes), "PROBE_SETTLING_S": "1"}
    environment = {**os.environ, **fake_cuda.environment, **small}
    command = [sys.executable, str(PROBE)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def failed_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("  ")[2] for line in result.stdout.splitlines() if line.startswith("FAIL")]


def test_it_passes_where_a_descriptor_keeps_the_memory(fake_cuda):
    result = probe(fake_cuda)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (result.stdout.count("PASS"), failed_lines(result)) == (4, [])


def test_it_fails_where_a_read_only_mapping_can_be_written(fake_cuda):
    fake_cuda.worsen("unprotected")
    result = probe(fake_cuda)
    assert result.returncode == 1
    # The second reader finds what the first has written.
    assert failed_lines(result)[-1] == "writes through the read-only mapping fail"
    assert fake_cuda.take_leaks() == ["handles=1 reserved=1 mapped=1"]  # a reader ends with its mapping


def test_it_fails_where_memory_dies_with_its_maker(fake_cuda):
    fake_cuda.worsen("forgetful")
    result = probe(fake_cuda)
    assert result.returncode == 1
    assert [line.partition(":")[0] for line in failed_lines(result)] == [
        "A's death leaves the memory",
        "C finds the bytes through a read-only mapping",
        "writes through the read-only mapping fail",
    ]


def test_it_fails_where_the_memory_does_not_come_back(fake_cuda):
    fake_cuda.worsen("hoarding")
    result = probe(fake_cuda)
    assert result.returncode == 1
    assert failed_lines(result) == [
        "A's death leaves the memory: 0 MiB used before A, 12 after",  # its context, too
        "B lets go: 0 MiB used before A, 20 in the end",
    ]


def test_what_was_used_before_counts_for_neither(fake_cuda, cuda_here):
    device = devices.find(None)
    with physical.allocate(physical.granularity(device), device=device):
        result = probe(fake_cuda)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 MiB used before A, 10 after" in result.stdout


def test_what_the_driver_gives_back_meanwhile_is_no_memory_of_ours(fake_cuda, cuda_here):
    """As little of it as a driver may keep for itself."""
    device = devices.find(None)
    before = physical.allocate(physical.granularity(device), device=device)
    with ThreadPoolExecutor() as pool:
        with fake_cuda.held("cuMemCreate"):
            made = fake_cuda.calls().count("cuMemCreate")
            running = pool.submit(probe, fake_cuda, spare_nbytes=2 << 20)
            eventually(lambda: fake_cuda.calls().count("cuMemCreate") > made)
            before.close()
        result = running.result()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 MiB used before A, 8 after" in result.stdout


def test_it_fails_where_no_memory_is_made(fake_cuda):
    fake_cuda.fail(("cuMemCreate", 1, 2))
    result = probe(fake_cuda)
    assert result.returncode == 1
    assert "FAIL  A made no memory" in result.stderr
    assert "cuMemCreate: <CUresult.CUDA_ERROR_OUT_OF_MEMORY: 2>" in result.stderr
