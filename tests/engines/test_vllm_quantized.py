"""Quantized checkpoints in vLLM with weights from a daemon: same tokens, and what its kernels make anew is said.

Those that vLLM 0.32 cannot run on a CPU with its own loader either (fp8 with one scale for a tensor, or for inputs, and
quantized experts) are not here.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.engines.cases import CASES
from tests.engines.cases.case import DECODER, Case
from tests.engines.engine import EngineError
from tests.engines.generating import said_by, said_without_cache, serving, started, with_cache
from tests.engines.test_quantization import CASES as WAYS

pytestmark = pytest.mark.timeout(300)

STORED = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("name", "made_anew"),
    [
        ("llama-fp8-channel-kv", False),
        ("llama-int8-channel", True),
        ("llama-int4-zero-points", True),
        ("llama-awq", True),
        ("llama-gptq", True),
    ],
)
def test_a_quantized_checkpoint_says_what_it_says_with_vllm_s_loader(generator, checkpoint, tmp_path, name, made_anew):
    model = checkpoint(STORED[name])
    expected = said_without_cache(generator, model)
    with serving(model, tmp_path / "run"):
        (worker,), tokens = said_by(generator, with_cache(model, tmp_path / "run"))
    assert tokens == expected
    anew = [name for name in worker["report"]["made_anew"] if "proj" in name]
    assert bool(anew) == made_anew
    assert ("has made weights anew" in generator.log().rpartition("weights of ")[2]) == made_anew
    assert worker["private_nbytes"] == 0


def test_weights_that_the_daemon_quantizes_are_had_by_an_engine_that_is_told_so(generator, checkpoint, tmp_path):
    """The plain checkpoint, quantized once, by the daemon: as vLLM runs the one that compressed-tensors quantized."""
    edit, _ = WAYS["int4=32"]
    plain = Case("llama-plain-pairs", {**DECODER, "model_type": "llama"})
    quantized = checkpoint(dataclasses.replace(plain, name="llama-int4-pairs", edit=edit))
    expected = said_without_cache(generator, quantized)
    described: dict = {}
    edit(described, {})
    arguments = with_cache(
        checkpoint(plain), tmp_path / "run", options={"quantization": "int4=32"}, hf_overrides=described
    )
    with serving(checkpoint(plain), tmp_path / "run", quantization="int4=32"):
        (worker,), tokens = said_by(generator, arguments)
    assert tokens == expected
    assert worker["report"]["source"] == "daemon"


def test_without_being_told_so_it_names_what_does_not_fit(generator, checkpoint, tmp_path):
    plain = Case("llama-plain-pairs", {**DECODER, "model_type": "llama"})
    arguments = with_cache(checkpoint(plain), tmp_path / "run", options={"quantization": "int4=32"})
    with serving(checkpoint(plain), tmp_path / "run", quantization="int4=32"), pytest.raises(EngineError) as caught:
        started(generator, arguments)
    assert caught.value.code == "bind"
    assert "qkv_proj.weight: missing from the weights" in str(caught.value)
