"""The steps that differ where vLLM computes on a GPU, taken by real vLLM on a CPU: for each request, what parameters
hold at the end by either way, and which of them are still mapped.

A process as `vllm_loader.py`, which it builds on. This one needs this project installed beside vLLM.
"""

from contextlib import nullcontext
from typing import Any

import vllm_loader
from answering import answer_requests
from parameters import parameters_of


def main() -> None:
    answer_requests(lambda folder: BoundRank(f"file://{folder}/gloo").both_ways)


class BoundRank(vllm_loader.FakeRank):  # type: ignore[misc]  # of this folder: found when it runs
    def both_ways(self, *, model: str, options: dict) -> dict:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.torch_utils import set_default_torch_dtype

        arguments = EngineArgs(
            model=model, max_model_len=64, enforce_eager=True, distributed_executor_backend="mp", **options
        )
        answer = {}
        for way in ("cpu", "gpu"):
            config = arguments.create_engine_config()
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                self._become((0, 1), (0, 1))
                answer[way] = self._bound(config, model, on_gpu=way == "gpu")
        return answer

    def _bound(self, config: Any, model: str, *, on_gpu: bool) -> dict:
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        from weightcached.client import attach
        from weightcached.client.vllm import on_gpu as steps
        from weightcached.client.vllm.in_place import bind_in_place, sharing_of, without_packing

        steps.LARGE_NBYTES = 256  # models are tiny here
        loader = get_model_loader(config.load_config)
        with self._device, steps.parameters_unfilled() if on_gpu else nullcontext():
            module = loader.create_model(config, config.model_config)
        taken = sum(one.untyped_storage().nbytes() for one in module.parameters())
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        with attach(model, mode="off", layout="fused", dtype=dtype) as weights:
            bind_in_place(module, weights, lacks_scales=True)
            copied = steps.give_copies(module, weights) if on_gpu else 0
            with without_packing():
                process_weights_after_loading(module, config.model_config, self._device)
            return {
                "parameters": parameters_of(module),
                "taken_nbytes": taken,
                "copied_nbytes": copied,
                "shared_nbytes": sharing_of(module, weights).nbytes_shared,
                "differing": weights.differing(),
            }


if __name__ == "__main__":
    main()
