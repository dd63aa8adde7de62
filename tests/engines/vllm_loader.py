"""vLLM's own loader as a process: for each request, the parameters of one rank after loading, before post-processing
or after.

Run by path, with the Python that has vLLM; imports nothing of this project but what lies beside it, and knows nothing
of what is compared. A request (`answering.py`) has the arguments of :meth:`FakeRank.parameters`.

One process plays every rank: it is told that it is rank R of N, which is all that loading asks. The bytes are those
of N processes (seen with gloo at TP 2).
"""

import gc
import os
from collections.abc import Callable

from answering import answer_requests
from parameters import parameters_of

os.environ |= {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    def made(folder: str) -> Callable[..., dict]:
        rank = FakeRank(f"file://{folder}/gloo")
        return lambda **request: {"parameters": rank.parameters(**request)}

    answer_requests(made)


class FakeRank:
    """This process as one rank after another, of any size."""

    def __init__(self, init_method: str) -> None:
        import torch
        from vllm.model_executor.models import registry
        from vllm.v1.worker.workspace import init_workspace_manager

        registry._run_in_subprocess = lambda inspect: inspect()  # of a model's class; a process takes twenty seconds
        self._device = torch.device("cpu")
        self._init_method = init_method
        init_workspace_manager(self._device)

    def parameters(
        self, *, model: str, tp: tuple[int, int], pp: tuple[int, int], options: dict, processed: bool = False
    ) -> dict:
        """Name → dtype, shape, SHA-256 and all names of the same memory. ``tp`` and ``pp`` are (index, size).

        ``options`` are those of vLLM's ``EngineArgs``, both sizes among them. ``processed``: after post-processing,
        which empties what it packs into a form of its own.
        """
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.utils.torch_utils import set_default_torch_dtype

        arguments = EngineArgs(
            model=model,
            max_model_len=64,
            enforce_eager=True,
            distributed_executor_backend="mp",  # whatever the number of processors: nothing is executed
            **options,
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            self._become(tp, pp)
            loader = get_model_loader(config.load_config)
            with self._device:
                module = loader.create_model(config, config.model_config)
            loader.load_weights(module, config.model_config)
            if processed:
                from vllm.model_executor.model_loader.utils import process_weights_after_loading

                process_weights_after_loading(module, config.model_config, self._device)
            held = parameters_of(module)
        del module
        gc.collect()  # modules are cycles, and hundreds of them are made here
        gc.freeze()  # the rest stays: looking at all that vLLM imports takes longer than loading
        return held

    def _become(self, tp: tuple[int, int], pp: tuple[int, int]) -> None:
        """Groups of one process, made anew because only models with experts have all, and then told otherwise."""
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
        from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

        _model_to_pp_missing_layer_names.clear()  # it knows models by their addresses, which others have after them
        parallel_state.destroy_model_parallel()
        init_distributed_environment(1, 0, self._init_method, local_rank=0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        groups = [(parallel_state._TP, tp), (parallel_state._EP, tp), (parallel_state._PP, pp)]
        for group, (index, size) in groups:
            if group is not None:
                group.world_size, group.ranks = size, list(range(size))
                group.rank = group.rank_in_group = index


if __name__ == "__main__":
    main()
