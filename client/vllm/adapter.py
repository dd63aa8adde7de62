"""The adapter of engine ``vllm``: the state that vLLM's own loader makes of a checkpoint, for one rank.

``weightcached serve --engine vllm … -- ARGS``: ARGS are those of `vllm serve`, and ``--weight-cache-stage``. At stage
``before`` the state is what lies in the module before ``process_weights_after_loading``, which every engine then does
for itself; at ``after`` it has been done, for methods that can start from that (``supports_pre_processed_weights``). On
a CPU vLLM packs linear layers into handles that no other process can have: those stay as they are at both stages.

Owns the key, and what may be asked; `building.py` builds. :func:`key_of` is for whoever has vLLM's config already: the
plugin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weightcached.client.segments import torch_device
from weightcached.client.vllm.building import Building, Stage
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.engines import Built, EngineRequest, Progress
from weightcached.protocol.errors import InvalidOption, UnsupportedModel
from weightcached.protocol.memory.chosen import CPU

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

NAME = "vllm"
REVISION = 1

_LOAD_FORMATS = ("auto", "hf", "safetensors")
_SWITCHES = re.compile(
    "AITER|AWQ|BATCH_INVARIANT|CUTLASS|DEEP_?GEMM|EMULATION|FLASHINFER|FP4|FP8|GEMM|GPTQ|INT4|INT8|KERNEL|LAYOUT"
    "|MARLIN|MLA|MOE|PACK|QUANT|ROCM|TRTLLM|XPU"
)
"""Of vLLM's environment variables, those that may change how weights are laid out."""
_QUANTIZATION_FILES = re.compile(r".*quant.*config.*\.json")
"""Where some methods keep what others have in config.json."""


class VllmAdapter:
    """See `protocol/engines.py` for what an adapter is."""

    name = NAME
    revision = REVISION

    def key(self, request: EngineRequest) -> Mapping[str, Any]:
        """Imports vLLM, and makes its config. Reads no weight."""
        asked = _Asked.of(request)
        gpu = asked.device.index or 0
        return key_of(asked.config, asked.config.model_config, request.model_dir, asked.stage, gpu=gpu).entries

    def build(self, request: EngineRequest, progress: Progress) -> Built:
        """Parameters, and buffers that a state dict has: all others follow from the config, in any engine."""
        progress("import vllm")
        asked = _Asked.of(request)
        return Building(asked.config, asked.stage, request.parallel, asked.device, progress).built()


ADAPTER = VllmAdapter()


def key_of(
    config: VllmConfig, model_config: ModelConfig, model_dir: Path, stage: Stage = "before", *, gpu: int = 0
) -> EngineKey:
    """The key of one model of ``config``, whose checkpoint is ``model_dir``, as vLLM is configured in this process.
    Compute it before the model is made, which changes the config. ``gpu`` is the number of the GPU where there is one.
    """
    import torch
    import vllm
    from vllm.config.utils import normalize_value
    from vllm.envs import environment_variables
    from vllm.platforms import current_platform

    switches = sorted(name for name in environment_variables if _SWITCHES.search(name) and name in os.environ)
    return EngineKey.of(
        NAME,
        REVISION,
        {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "stage": stage,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "architecture": model_config.architecture,
            "runner": model_config.runner_type,
            "convert": model_config.convert_type,
            "quantization": model_config.quantization,
            "quantization_config": _plain(normalize_value(model_config.quantization_config)),
            "quantization_files": _quantization_files(model_dir),
            "hf_overrides": _plain(model_config.hf_overrides),
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "linear_backend": str(config.kernel_config.linear_backend),
            "moe_backend": str(config.kernel_config.moe_backend),
            "platform": current_platform.device_type,
            "instruction_set": _instruction_set(gpu),
            "environment": {name: os.environ[name] for name in switches},
        },
    )


def _plain(value: Any) -> Any:
    """What JSON can say of it; what it cannot is refused, because two of them could not be compared."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            "vLLM is configured with what no key can hold", expected="values of JSON", found=str(error)
        ) from error


def _quantization_files(model_dir: Path) -> dict[str, str]:
    """Name → SHA-256."""
    found = {}
    for entry in sorted(os.scandir(model_dir), key=lambda entry: entry.name):
        if _QUANTIZATION_FILES.fullmatch(entry.name) and entry.is_file():
            with open(entry.path, "rb") as file:
                found[entry.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _instruction_set(gpu: int) -> str:
    """What vLLM's kernels look at when they choose how weights lie: a CPU's features, or a GPU's compute capability."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"capability {current_platform.get_device_capability(gpu)}"
    features = [name for name in ("amx_tile", "avx512_bf16") if getattr(torch.cpu, f"_is_{name}_supported")()]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *features])


@dataclass(frozen=True)
class _Asked:
    """A request in vLLM's words."""

    config: VllmConfig
    stage: Stage
    device: torch.device

    @classmethod
    def of(cls, request: EngineRequest) -> _Asked:
        """Raises InvalidOption for arguments that vLLM, or this adapter, does not take."""
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # or it looks for one that peers could reach
        from vllm.engine.arg_utils import EngineArgs

        given, stage = _parsed(request.arguments)
        for option, value in _ours(request).items():
            _set(given, option, value)
        given.distributed_executor_backend = "mp"  # whatever the number of processors: nothing is executed here
        if given.load_format not in _LOAD_FORMATS:
            raise InvalidOption(
                "the daemon's vLLM loads by itself",
                expected=f"--load-format {_LOAD_FORMATS[0]}",
                found=given.load_format,
            )
        config = EngineArgs.from_cli_args(given).create_engine_config()
        return cls(config, stage, _device_of(config, request.device))


def _device_of(config: VllmConfig, device: str) -> torch.device:
    """The device that a request is for. Raises InvalidOption where this vLLM computes on another kind."""
    import torch

    kind = torch.device(config.device_config.device).type
    if kind != ("cpu" if device == CPU else "cuda"):
        raise InvalidOption(
            "this vLLM computes on another kind of device than the weights are to live on",
            expected=f"--device {kind}" if kind in ("cpu", "cuda") else "vLLM on a CPU or on NVIDIA's GPUs",
            found=f"vLLM on {kind}, weights on {device}",
        )
    return torch_device(device)


def _parsed(arguments: tuple[str, ...]) -> tuple[argparse.Namespace, Stage]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not there where types are checked
        def error(self, message: str) -> NoReturn:
            raise InvalidOption("vLLM does not take these arguments", found=message)

    parser = Parser(prog="weightcached serve --engine vllm --", add_help=False)
    parser.add_argument("--weight-cache-stage", choices=("before", "after"), default="before")
    given = EngineArgs.add_cli_args(parser).parse_args(list(arguments))
    return given, given.weight_cache_stage


def _ours(request: EngineRequest) -> dict[str, object]:
    """vLLM's options that follow from the daemon's."""
    parallel = request.parallel
    if parallel.dp_size > 1 or parallel.ep_size not in (1, parallel.tp_size):
        raise InvalidOption(
            "engine vllm has no such rank alone",
            expected="dp size 1, and ep size 1 or the tp size",
            found=f"dp size {parallel.dp_size}, ep size {parallel.ep_size}, tp size {parallel.tp_size}",
        )
    ours: dict[str, object] = {
        "model": os.fspath(request.model_dir),
        "tensor_parallel_size": parallel.tp_size,
        "pipeline_parallel_size": parallel.pp_size,
        "enable_expert_parallel": parallel.ep_size > 1,
    }
    if parallel.ep_size > 1:
        ours["expert_placement_strategy"] = parallel.expert_placement
    if request.dtype != "auto":
        ours["dtype"] = request.dtype
    return ours


def _set(given: argparse.Namespace, option: str, value: object) -> None:
    """An option that was given differently contradicts the daemon's own."""
    from vllm.engine.arg_utils import EngineArgs

    default = getattr(EngineArgs, option)
    if getattr(given, option) not in (value, default):
        raise InvalidOption(
            f"vLLM's --{option.replace('_', '-')} contradicts the daemon's own options",
            expected=value,
            found=getattr(given, option),
            next_step="leave it out: sizes, ranks and the model are told before --",
        )
    setattr(given, option, value)
