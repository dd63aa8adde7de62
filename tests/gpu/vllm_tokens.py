"""vLLM as a process of its own, which generates once and ends: it does not give back a GPU that it has used.

    python -m tests.gpu.vllm_tokens MODEL off
    python -m tests.gpu.vllm_tokens MODEL require RUNTIME_DIR

The last line on standard output is JSON: the tokens, and of a model from the cache what the loader reports.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOKENS = 24
KV_CACHE_NBYTES = 256 << 20
SERVED: dict[str, Any] = {"layout": "fused", "dtype": "bfloat16"}
"""What a daemon has to be told to have what vLLM asks for, of a checkpoint in bf16."""


def main(model: str, mode: str, runtime_dir: str | None = None) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "WEIGHTCACHED_CACHE_DIR": os.path.join(os.path.dirname(model), "digests"),
    }
    from vllm import LLM, SamplingParams

    from weightcached.client.vllm.plugin import register

    register()  # nothing is installed here, so no entry point tells vLLM of it
    cached = {
        "load_format": "weightcached",
        "model_loader_extra_config": {"weight_cache_mode": mode, "runtime_dir": runtime_dir},
    }
    engine = LLM(
        model,
        dtype=SERVED["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=KV_CACHE_NBYTES,
        **({} if mode == "off" else cached),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    [answer] = engine.generate([{"prompt_token_ids": list(range(1, 17))}], sampling)
    report = engine.apply_model(_report)[0] if mode != "off" else None
    print(json.dumps({"tokens": list(answer.outputs[0].token_ids), "report": report}), flush=True)


def _report(model: object) -> dict[str, int]:
    found = model.weightcached  # type: ignore[attr-defined]  # the loader's
    return {"nbytes_shared": found.nbytes_shared, "made_anew": sum(found.made_anew.values())}


if __name__ == "__main__":
    main(*sys.argv[1:])
