"""The model loader that vLLM calls: weights, agreement, module, binding, post-processing, in this order.

Owns :class:`WeightcachedLoader`, one per question that vLLM has; it keeps nothing between them. The weights come first,
before the module: an engine whose daemon is absent, or serves something else, says so at once and on every rank.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from weightcached.client.timing import Stages
from weightcached.client.vllm import obtain, swapping
from weightcached.client.vllm.adapter import key_of
from weightcached.client.vllm.in_place import bind_in_place, require_servable, sharing_of, without_packing
from weightcached.client.vllm.on_gpu import give_copies, parameters_unfilled
from weightcached.client.vllm.options import parse
from weightcached.client.vllm.processed import bind_processed, require_processed
from weightcached.client.vllm.ranks import home_of, number_of, parallel_of
from weightcached.client.vllm.report import LoadReport, own_memory_nbytes
from weightcached.client.vllm.together import obtain_together
from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import DaemonAbsent, UnsupportedModel
from weightcached.protocol.hub import resolve

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig

logger = logging.getLogger("vllm.weightcached")  # under vLLM's own, whose handlers and level it has


class WeightcachedLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Load format `weightcached`. Options: :class:`LoaderOptions`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = parse(load_config.model_loader_extra_config)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        """The model, its parameters mapped; or vLLM's own loader's, where the contract has it so.

        All ranks call it together. Raises the errors of ``attach``, RanksDisagree, UnsupportedModel, BindError.
        """
        name = self._name(vllm_config, model_config)
        if name is None:
            return self._loaded_by_vllm(vllm_config, model_config, prefix)
        stages, own_nbytes = Stages(), own_memory_nbytes()
        with stages.stage("attach"):
            found = obtain_together(
                lambda: self._wish(name, vllm_config, model_config),
                # Daemons that their workers own load first, all at once, and what is theirs nobody else changes.
                leader_first=self._options.want == "current" and self._options.weight_cache_mode != "daemon",
                may_fall_back=self._options.weight_cache_mode == "client",
            )
        if found.weights is None:
            with stages.stage("vLLM's own loader"):
                model = self._loaded_by_vllm(vllm_config, model_config, prefix)
            report = LoadReport(source="disk", place=found.place, seconds=stages.seconds)
        else:
            weights = found.weights
            try:
                model = self._built(vllm_config, model_config, prefix, weights, stages)
            except BaseException:
                weights.close()
                raise
            weakref.finalize(model, weights.close)
            sharing = sharing_of(model, weights)
            swapping.remember(model, weights, sharing.made_anew)
            report = LoadReport(
                source="daemon",
                place=found.place,
                version=weights.version,
                generation=weights.generation,
                nbytes_shared=sharing.nbytes_shared,
                made_anew=sharing.made_anew,
                seconds=stages.seconds,
            )
        report = dataclasses.replace(report, nbytes_private=own_memory_nbytes() - own_nbytes)
        report.log(logger)
        model.weightcached = report  # type: ignore[assignment]  # modules take attributes of any kind
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Refused: a bound model has no weights of its own to write into."""
        raise UnsupportedModel(
            "weights cannot be loaded again into a model whose parameters are mapped",
            next_step="start the engine again: that is what the cache makes fast",
        )

    def download_model(self, model_config: ModelConfig) -> None:
        """config.json and the weights, where the model is a hub id. Blocks as long as that takes."""
        resolve(model_config.model, revision=_revision(model_config))

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of weights outside this process's own memory, so that vLLM sizes its caches with them counted: on a GPU
        whole pages of it, which vLLM takes off the part of the GPU that it may use.

        Asked before the model is loaded. 0 where vLLM's own loader is going to be used.
        """
        name = self._name(vllm_config, vllm_config.model_config)
        if name is None:
            return 0
        try:
            with obtain.weights_for(self._wish(name, vllm_config, vllm_config.model_config)) as weights:
                return weights.resident_bytes
        except DaemonAbsent:
            if self._options.weight_cache_mode != "client":
                raise
            return 0

    def _name(self, vllm_config: VllmConfig, model_config: ModelConfig) -> str | None:
        """The daemon's name for this model; None where the options say that vLLM loads it itself."""
        if self._options.weight_cache_mode == "off":
            return None
        speculative = vllm_config.speculative_config
        if speculative is None or model_config is not speculative.draft_model_config:
            return self._options.name
        if self._options.draft_name is None:
            logger.info("the loader's options have no draft_name: vLLM loads the draft model itself")
        return self._options.draft_name

    def _wish(self, name: str, vllm_config: VllmConfig, model_config: ModelConfig) -> obtain.Wish:
        model_dir = resolve(model_config.model, revision=_revision(model_config))
        dtype = obtain.dtype_to_ask_for(self._options, model_dir, model_config.dtype)
        engine = None
        if self._options.layout == "vllm":
            gpu = number_of(self._device(vllm_config))
            engine = key_of(vllm_config, model_config, model_dir, self._options.stage, gpu=gpu)
        home = home_of(self._device(vllm_config))
        return obtain.Wish(self._options, name, model_dir, parallel_of(vllm_config, model_config), dtype, engine, home)

    def _device(self, vllm_config: VllmConfig) -> torch.device:
        return torch.device(self.load_config.device or vllm_config.device_config.device)

    def _built(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str, weights: WeightSet, stages: Stages
    ) -> torch.nn.Module:
        """The module with ``weights`` in it, ready to compute."""
        device = self._device(vllm_config)
        on_gpu = device.type != "cpu"
        with set_default_torch_dtype(model_config.dtype):
            with stages.stage("module"), device, parameters_unfilled() if on_gpu else nullcontext():
                model: torch.nn.Module = self.create_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            require_servable(model)
            processed = self._options.stage == "after"
            with stages.stage("bind"):
                if processed:
                    bind_processed(model, weights)
                else:
                    # What vLLM starts from where a checkpoint has no scales is in a layout of its own already.
                    bind_in_place(model, weights, lacks_scales=self._options.layout == "fused")
                    if on_gpu:
                        give_copies(model, weights)
            with (
                stages.stage("post-processing"),
                without_packing(),
                weights_already_processed() if processed else nullcontext(),
            ):
                process_weights_after_loading(model, model_config, device)
            if processed:
                require_processed(model, weights)
        if vllm_config.cache_config.kv_cache_memory_bytes is None:
            # On a CPU vLLM gives its cache what the process does not have resident: a mapping counts once its pages
            # are in the page table, and nothing has touched them yet.
            with stages.stage("map pages"):
                weights.populate()
        model.eval()
        return model

    def _loaded_by_vllm(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> torch.nn.Module:
        own = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        loader = DefaultModelLoader(own)
        model: torch.nn.Module = loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        return model


def _revision(model_config: ModelConfig) -> str | None:
    """The hub's revision that was asked for; a directory has none."""
    return None if os.path.isdir(model_config.model) else model_config.revision
