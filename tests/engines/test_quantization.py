"""Online quantization makes what vLLM makes itself (fp8), or holds of a checkpoint that compressed-tensors made
(integers).
"""

from __future__ import annotations

import dataclasses
import re
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import checkpoints
from tests.engines.cases.case import DECODER, Case
from tests.engines.compare import loaded
from tests.engines.engine import PYTHON
from tests.engines.held import differences
from tests.engines.quantized import by_compressed_tensors
from tests.support.unprivileged import ROOT
from weightcached.client import attach

PLAIN = Case("llama-plain", {**DECODER, "model_type": "llama", "intermediate_size": 344})
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "scale_dtype": "torch.bfloat16"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
CASES = {
    # A channel's scale is this rank's own, so where ranks have columns each it is the whole checkpoint's at TP 1 only.
    "int8": (by_compressed_tensors("int-quantized", INT8, TOKEN), (1,)),
    "int4=32": (by_compressed_tensors("pack-quantized", {**INT4, "symmetric": True}), (1, 2)),
    "int4-asym=32": (by_compressed_tensors("pack-quantized", {**INT4, "symmetric": False}), (1, 2)),
}


@pytest.mark.timeout(300)
def test_fp8_is_what_vllm_makes_of_the_same_weights(tmp_path):
    """At TP 1: with more ranks vLLM takes the largest value of all of them where they share what has a scale."""
    model = checkpoints.write(PLAIN, tmp_path / "model")
    with attach(model, mode="off", layout="fused") as weights:
        plain = {name: tensor.clone() for name, tensor in weights.items() if name.endswith("proj.weight")}
    save_file(plain, tmp_path / "plain.safetensors")
    script = ROOT / "tests" / "engines" / "vllm_quantizer.py"
    subprocess.run([PYTHON, script, tmp_path / "plain.safetensors", tmp_path / "theirs.safetensors"], check=True)
    theirs = load_file(tmp_path / "theirs.safetensors")
    assert len(theirs) == 3 * 2 * len(plain)
    for method in ("fp8", "fp8-tensor", "fp8-block"):
        with attach(model, mode="off", layout="fused", quantization=method) as weights:
            ours = dict(weights.items())
            for name, tensor in theirs.items():
                if name.startswith(f"{method}/"):
                    mine = ours[name.removeprefix(f"{method}/")]
                    assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
                    assert torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", CASES)
def test_integers_are_what_vllm_holds_of_a_checkpoint_quantized_alike(vllm, tmp_path, method):
    edit, tp_sizes = CASES[method]
    case = Case("llama", {**DECODER, "model_type": "llama"}, tp_sizes=tp_sizes, options={"quantization": method})
    model = checkpoints.write(case, tmp_path / "plain")
    quantized = checkpoints.write(dataclasses.replace(case, edit=edit), tmp_path / "quantized")
    for rank in case.ranks():
        found = differences(vllm.held(quantized, case, rank), loaded(model, case, rank))
        # What a cache is quantized with, where the checkpoint says; and the shape of whichever part was loaded last.
        theirs = re.compile(r".*\.attn\..* name|.*\.weight_shape sha256")
        assert [str(one) for one in found if not theirs.fullmatch(f"{one.name} {one.what}")] == []
