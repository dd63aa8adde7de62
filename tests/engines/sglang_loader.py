"""SGLang's loading code as a process: what it holds of a checkpoint, by its own loader or by that of our page.

Run by path, with the Python that has SGLang. A list of requests comes as JSON on standard input (the arguments of
:meth:`FakeRank.held`), the list of answers goes out as JSON on what was standard output; an answer is what is held, or
an error. What SGLang prints goes to standard error. One process plays every rank: it is told that it is rank R of N.
"""

import argparse
import copy
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable

from looking import mapped_areas
from parameters import parameters_of

os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
# torchvision's operators may be of another build of torch. Nothing here uses them, but what declares them would fail.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        rank = FakeRank(f"file://{folder}/gloo", requests["page"])
        print(
            json.dumps([facts(), *(_answer(rank, request) for request in requests["held"])]), file=answers, flush=True
        )


def _answer(rank: "FakeRank", request: dict) -> dict:
    try:
        return rank.held(**request)
    except Exception:  # noqa: BLE001 - whatever the engine raises is the answer
        return {"error": traceback.format_exc()}


def facts() -> dict:
    """What the page says of SGLang's own cache, from its own code."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.weight_cache import ipc_loader, protocol
    from sglang.srt.weight_cache.daemon import WeightCacheDaemon

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (modes,) = [action.choices or () for action in parser._actions if "--weight-cache-mode" in action.option_strings]
    daemon = WeightCacheDaemon.__new__(WeightCacheDaemon)  # its constructor asks for a GPU's name
    return {
        "modes": list(modes),
        "key": list(protocol.CacheConfig.__struct_fields__),
        "largest_message_nbytes": protocol.MAX_MSG_SIZE,
        "quantizations": sorted(protocol.IPC_QUANT_ALLOWLIST),
        "watchdog_s": ipc_loader._DAEMON_LIVENESS_POLL_INTERVAL,
        "refusal": _refusal_of(daemon.load),
        "without_the_plugin": _refusal_of(
            lambda: DefaultModelLoader(LoadConfig(model_loader_extra_config={"weightcached": {}}))
        ),
    }


def _refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


class FakeRank:
    """This process as one rank after another."""

    def __init__(self, init_method: str, page: str) -> None:
        self._init_method = init_method
        self._begun = False
        spec = importlib.util.spec_from_file_location("weightcached_sglang", page)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from sglang.srt.plugins.hook_registry import HookRegistry

        module.plugin()
        HookRegistry.apply_hooks()

    def held(self, *, model: str, tp: tuple[int, int], options: dict | None, again: dict | None = None) -> dict:
        """Name → dtype, shape, SHA-256 and all names of the same memory, after loading with ``options`` of our loader,
        or with SGLang's own for ``None``. ``tp`` is (index, size). With ``again``, options of `attach`, parameters are
        emptied and filled by the module's ``load_weights`` from copies that share their memory.
        """
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader import loader as loaders
        from sglang.srt.runtime_context import get_parallel

        self._begin(model)
        config = ModelConfig(model_path=model, dtype="bfloat16")
        extra = {} if options is None else {"weightcached": options}
        rank, size = tp
        group = copy.copy(get_parallel().tp_group)
        group.world_size, group.ranks, group.rank, group.rank_in_group = size, list(range(size)), rank, rank
        kinds = ("tp", "attn_tp", "moe_tp")
        told = {f"{kind}_size": size for kind in kinds} | {f"{kind}_rank": rank for kind in kinds}
        with get_parallel().override(**told, **{f"{kind}_group": group for kind in kinds}):
            loader = loaders.get_model_loader(LoadConfig(model_loader_extra_config=extra), config)
            module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
            if again is not None:
                _load_again(module, model, again)
        return {
            "loader": type(loader).__name__,
            "preloaded_nbytes": loader.preloaded_weights_bytes,
            "private_nbytes": sum(account["Anonymous"] for _, _, account in mapped_areas()),
            "parameters": parameters_of(module),
            "on_meta": [name for name, tensor in module.named_buffers() if tensor.is_meta],
        }

    def _begin(self, model: str) -> None:
        if self._begun:
            return
        from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(model_path=model, device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        init_distributed_environment(1, 0, self._init_method, local_rank=0, backend="gloo")
        initialize_model_parallel()
        initialize_dp_attention(arguments)
        self._begun = True


def _load_again(module, model: str, options: dict) -> None:
    import torch

    from weightcached.client import attach

    with torch.no_grad(), attach(model, mode="require", **options) as weights:
        for parameter in module.parameters():
            parameter.zero_()
        module.load_weights(weights.copies(reuse_memory=True))


if __name__ == "__main__":
    main()
