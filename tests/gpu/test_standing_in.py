"""Rows that need torch with CUDA, with tensors of the host in the place of a device's: ``standing_in.py`` says what
that shows, and what not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict

import pytest

from tests.gpu.row import Setting
from tests.support.unprivileged import ROOT

ROWS = ("graph", "allocator", "arithmetic", "attach", "tokens")
ON_DEVICE = """
import torch
from tests.gpu import products, standing_in
from tests.gpu.products import Products

standing_in.install()
matrix = torch.ones(512, 512, device="cuda")
with Products(matrix) as computing:
    computing.wait_for(products.AHEAD // 2)
    under_way = computing.under_way()
    before = sum(not product.done for product in under_way)
    computing.wait_for(products.AHEAD)
    print(1 < before <= products.AHEAD, sum(not product.done for product in under_way), computing.finished > 0)

def refused(work):
    try:
        work()
    except (AttributeError, RuntimeError) as error:
        print(error)

def synchronize_while_capturing():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()

refused(lambda: matrix @ torch.ones(512, 8))
refused(synchronize_while_capturing)
refused(lambda: standing_in._put(torch.cuda, synchronise=None))
refused(lambda: torch.multiprocessing.get_context("fork"))
print(matrix.device, torch.ones(1).device, matrix.cpu().device)
"""


def run(fake_cuda, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**fake_cuda.whole_environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rows_ask_torch_for_what_it_has_in_an_order_that_makes_sense(fake_cuda, tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        setting = Setting(fake_cuda.devices[0].uuid, str(tmp_path), rehearsal=True, alone=False, sockets=sockets)
        ended = run(fake_cuda, "-P", "-m", "tests.gpu.standing_in", json.dumps(asdict(setting)), *ROWS)
    assert ended.returncode == 0, ended.stderr
    outcomes = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"verdict"')]
    assert [outcome["verdict"] for outcome in outcomes] == ["PASS"] * len(ROWS), ended.stdout + ended.stderr
    assert "torch, tensor by tensor" in outcomes[ROWS.index("attach")]["said"]


def test_products_are_launched_ahead_and_what_a_device_refuses_is_refused(fake_cuda):
    ended = run(fake_cuda, "-c", ON_DEVICE)
    assert ended.stdout.splitlines() == [
        "True 0 True",
        "matmul: expected all tensors to be on the same device",
        "synchronize: operation not permitted when stream is capturing",
        "module 'torch.cuda' has no attribute 'synchronise'",
        "a process made by fork cannot use CUDA again: use spawn",
        "cuda:0 cpu cpu",
    ], ended.stderr


def test_a_process_that_cannot_take_torchs_tensors_fails_the_comparison_and_does_not_hang_it(fake_cuda):
    """Without a stand-in the process that is started anew has no CUDA."""
    program = "from tests.gpu.torch_ipc import seconds_to_share; seconds_to_share(2, sizes=[2])"
    ended = run(fake_cuda, "-c", program)
    assert "AssertionError: the process that torch shares with ended with 1" in ended.stderr
    assert "CUDA" in ended.stderr
