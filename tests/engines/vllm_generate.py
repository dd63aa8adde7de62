"""vLLM as an engine that generates: a process that starts one after the other, and answers what each has said.

Run by path, with the Python that has vLLM and this project. A line on what was standard output says that it is ready;
then a request is a line of JSON on standard input (the arguments of :func:`generate`), its answer a line of JSON. What
vLLM prints goes to standard error. It ends when its input does.

Engines of one rank run in this process, which is fast; those of more have a process for each rank.
"""

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext

os.environ |= {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_CACHE_ROOT"] = folder
        import vllm  # noqa: F401

        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            answer: dict
            try:
                answer = generate(**json.loads(line))
            except BaseException as error:  # noqa: BLE001 - whatever the engine raises is the answer
                answer = {"error": traceback.format_exc(), "type": type(error).__name__, "code": code_of(error)}
            gc.collect()
            print(json.dumps(answer), file=answers, flush=True)


def code_of(error):
    """The code of the error of our tree that this is, or was made from."""
    while error is not None:
        if hasattr(error, "code") and isinstance(error.code, str):
            return error.code
        error = error.__cause__ or error.__context__
    return None


def generate(*, prompts: list[list[int]], max_tokens: int, packing: bool = True, **engine: object) -> dict:
    """Start an engine with these ``EngineArgs``, continue the prompts greedily, end it.

    Without ``packing`` vLLM's own loader leaves matrices as they are, too: the kernels that multiply with packed ones
    round otherwise, so that tokens of two engines are comparable only where both have the same.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from weightcached.client.vllm.in_place import without_packing

    inside = engine.get("distributed_executor_backend", "uni") == "uni"
    extension = "looking" if packing or inside else "unpacked"
    began = time.monotonic()
    with without_packing() if inside and not packing else nullcontext():
        llm = LLM(
            enforce_eager=True,
            skip_tokenizer_init=True,
            worker_extension_cls=f"tests.engines.{extension}.Looking",
            **{"max_model_len": 64, "distributed_executor_backend": "uni", **engine},
        )
    try:
        up = time.monotonic()
        wanted = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
        done = time.monotonic()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "workers": llm.collective_rpc("look"),
            "seconds": {"start": up - began, "generation": done - up},
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
