"""vLLM as an engine that generates: a process with one engine at a time, which it starts, asks and ends when told to.

Run by path, with the Python that has vLLM and this project. Of a request (`answering.py`) ``do`` names a method of
:class:`Server`, the rest are its arguments.

An engine of one rank runs in this process, which is fast; one of more has a process for each.
"""

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from answering import answer_requests

os.environ |= {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    def made(_: str) -> Callable[..., dict]:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda inspect: inspect()  # of a model's class; a process takes twenty seconds
        return Server().answer

    answer_requests(made)


def _code_of(error):
    """The code of the error of our tree that this is, or was made from."""
    while error is not None and not isinstance(getattr(error, "code", None), str):
        error = error.__cause__ or error.__context__
    return getattr(error, "code", None)


class Server:
    """At most one engine."""

    def __init__(self) -> None:
        self._llm: Any = None

    def answer(self, *, do: str, **request: Any) -> dict:
        """Of the method ``do``. One that raises ends the engine."""
        answer: dict
        try:
            answer = getattr(self, do)(**request)
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the answer
            answer = {"error": traceback.format_exc(), "code": _code_of(error)}
            self.end()
        return answer

    def start(self, *, packing: bool = True, **engine: object) -> dict:
        """Start an engine with these ``EngineArgs``; what its workers say of themselves.

        Without ``packing`` vLLM's own loader leaves matrices as they are, too: the kernels that multiply with packed
        ones round otherwise, so that tokens of two engines are comparable only where both have the same.
        """
        from vllm import LLM

        from weightcached.client.vllm.in_place import without_packing

        inside = engine.get("distributed_executor_backend", "uni") == "uni"
        extension = "looking" if packing or inside else "unpacked"
        defaults = {"max_model_len": 64, "distributed_executor_backend": "uni", "enforce_eager": True}
        began = time.monotonic()
        with without_packing() if inside and not packing else nullcontext():
            self._llm = LLM(
                skip_tokenizer_init=True,
                worker_extension_cls=f"tests.engines.{extension}.Looking",
                **{**defaults, **engine},
            )
        seconds = time.monotonic() - began
        return {"workers": self._llm.collective_rpc("look"), "seconds": seconds}

    def say(self, *, prompts: list[list[int]], max_tokens: int, adapter: str | None = None) -> dict:
        """Continue the prompts greedily, with the LoRA adapter in the directory ``adapter``, if there is one. Beside
        the tokens: how many of each prompt's were not computed, because they were in the prefix cache.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        wanted = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began = time.monotonic()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
        outputs = self._llm.generate(given, wanted, use_tqdm=False, lora_request=lora)
        seconds = time.monotonic() - began
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": seconds,
        }

    def look(self) -> dict:
        """What the workers say of themselves now."""
        return {"workers": self._llm.collective_rpc("look")}

    def switch(self, *, version: str | None = None) -> dict:
        """Have all ranks take another version of their weights."""
        from weightcached.client.vllm.switching import published_version, switch_weights

        published = published_version(self._llm)
        return {"published": published, "ranks": switch_weights(self._llm, version=version, timeout_s=60)}

    def rpc(self, *, method: str, args: Sequence[object] = ()) -> dict:
        """What a method of the workers answers, by itself."""
        return {"ranks": self._llm.collective_rpc(method, args=tuple(args))}

    def end(self) -> dict:
        """End the engine, if there is one."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        cleanup_dist_env_and_memory()
        gc.collect()
        return {}


if __name__ == "__main__":
    main()
