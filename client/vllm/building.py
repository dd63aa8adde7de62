"""A model of vLLM, built by vLLM's own loader for one rank without its peers, and what of it is its state.

Owns the order of the build, and what is refused by name because no other process could have it. Called by the adapter,
in a process that ends after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import Built, NamedTensor, Progress
from weightcached.protocol.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig

Stage = Literal["before", "after"]
"""Of post-processing."""


class Building:
    """One model for one rank, from vLLM's config to its state."""

    def __init__(
        self, config: VllmConfig, stage: Stage, parallel: Parallel, device: torch.device, progress: Progress
    ) -> None:
        """``device`` is of the kind that ``config`` says."""
        import torch
        from vllm.model_executor.model_loader import get_model_loader

        self._config = config
        self._model_config: ModelConfig = config.model_config
        self._stage = stage
        self._progress = progress
        self._device = device
        if device.type != "cpu":
            torch.cuda.set_device(device)
        self._parallel = parallel
        self._loader = get_model_loader(config.load_config)

    def built(self) -> Built:
        """Before post-processing, parameters have their form once the module is there: vLLM then loads into the segment
        itself. Post-processing makes others, which are copied.
        """
        from vllm.v1.worker.workspace import init_workspace_manager

        from weightcached.client.vllm.alone import alone_as

        init_workspace_manager(self._device)
        alone = ExitStack()  # until the weights are loaded
        with self._configured():
            alone.enter_context(alone_as(self._parallel, self._device.index or 0))
            self._progress("build vllm model")
            with self._device:
                model: torch.nn.Module = self._loader.create_model(self._config, self._model_config)
        _require_supported(model, self._stage)

        def fill() -> Built:
            with alone, self._configured():
                self._progress("load weights with vllm")
                self._loader.load_weights(model, self._model_config)
                if self._stage == "after":
                    self._progress("post-process with vllm")
                    _post_process(model, self._model_config, self._device)
            return Built(tensors=tuple(_state(model)))

        return Built(tensors=tuple(_state(model)), fill=fill) if self._stage == "before" else fill()

    @contextmanager
    def _configured(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_current_vllm_config(self._config), set_default_torch_dtype(self._model_config.dtype):
            yield


def _require_supported(model: torch.nn.Module, stage: Stage) -> None:
    """Raises UnsupportedModel naming the layer and the method whose state cannot be shared at this stage."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            continue
        if getattr(method, "uses_meta_device", False):
            raise UnsupportedModel(
                f"layer {name}: {type(method).__name__} quantizes while it loads, and keeps its own form of the result",
                next_step="leave vLLM's --quantization out, or serve --layout fused --quantization …",
            )
        if stage == "after" and not method.supports_pre_processed_weights:
            raise UnsupportedModel(
                f"layer {name}: {type(method).__name__} cannot start from weights that are post-processed already",
                expected="a method that supports pre-processed weights",
                next_step="use --weight-cache-stage before",
            )


def _post_process(model: torch.nn.Module, model_config: ModelConfig, device: torch.device) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from weightcached.client.vllm.in_place import without_packing

    full = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.numel()}
    with without_packing():
        process_weights_after_loading(model, model_config, device)
    left = dict(model.named_parameters(remove_duplicate=False))
    if emptied := sorted(name for name in full & left.keys() if not left[name].numel()):
        raise UnsupportedModel(
            "vLLM keeps these parameters in a form of its own, which cannot be shared",
            found=f"{len(emptied)} emptied: {', '.join(emptied[:8])}",
            next_step="use --weight-cache-stage before",
        )


def _state(model: torch.nn.Module) -> Iterator[NamedTensor]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield NamedTensor(name, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            yield NamedTensor(name, buffer, "buffer")
