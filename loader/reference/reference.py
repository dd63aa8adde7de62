"""The reference itself: which parameters a rank should have, and each of them made of whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from weightcached.loader.reference import experts
from weightcached.loader.reference.cuts import Axes, axes_of, cut, fused, in_parts, is_linear, way_of
from weightcached.loader.reference.files import Files, NotOnDisk
from weightcached.loader.reference.model import ARCHITECTURES, Model
from weightcached.loader.reference.names import PARTS, Place, Sources, belonging
from weightcached.loader.reference.online import endings, quantized
from weightcached.loader.reference.ranks import NotCompared, Ranks, Unfit
from weightcached.protocol.config import CacheConfig

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FLOAT32 = ("input_scale", "weight_scale_inv", "e_score_correction_bias")
_FLOAT32_MODULES = ("classifier", "bert.pooler.dense")
"""What engines have in float32 whatever the model is; scales of one-byte weights, too."""
_LAST = ("weight_shape", "weight_g_idx", "g_idx", "input_zero_point")
"""Of these a fused layer has its last part's: all parts have the same inputs."""


class Reference:
    """Of one checkpoint and one rank's config. A context manager: files are open meanwhile."""

    def __init__(self, model_dir: Path, config: CacheConfig) -> None:
        """Raises CheckpointError when the files cannot be opened."""
        self._config = config
        self._ranks = Ranks.of(config.parallel)
        self._files = Files(model_dir)
        self._sources: dict[str, Sources] = {}
        """Parameter → what it is made of, before any online quantization."""
        self._products: dict[str, list[str]] = {}
        """A weight that an online quantization takes → what it makes of it."""
        self._weights: dict[str, str] = {}
        """The same the other way."""
        self._latest: tuple[str, dict[str, torch.Tensor]] = ("", {})
        """The weight that was quantized last, and all that was made of it."""
        if config.layout == "fused" and config.architecture in ARCHITECTURES:
            self._model = Model(config)
            self._sources = belonging(self._files, self._model, self._ranks)
            made_of_each = endings(config.quantization)
            self._products = {
                name: [name + ending for ending in made_of_each]
                for name, ((place, _), *_) in self._sources.items()
                if made_of_each and place.suffix in ("weight", "stack", "turned_stack") and is_linear(place.layer)
            }
            self._weights = {product: name for name, products in self._products.items() for product in products}

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._latest = ("", {})
        self._files.__exit__()

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of that name, in memory of its own. Raises NotCompared, NotOnDisk or Unfit."""
        try:
            return self._parameter(name)
        except (IndexError, RuntimeError) as error:  # torch's, of shapes
            raise Unfit(str(error)) from error

    def _parameter(self, name: str) -> torch.Tensor:
        if self._config.layout == "hf":
            return self._cast(self._files.tensor(name))
        if self._config.layout != "fused" or self._config.architecture not in ARCHITECTURES:
            raise NotCompared(f"no rules for {self._config.architecture} in layout {self._config.layout}")
        if weight := self._weights.get(name):
            if self._latest[0] != weight:
                self._latest = (weight, self._quantized(weight))
            return self._latest[1][name]
        if name not in self._sources or name in self._products:
            raise NotOnDisk(name)
        return self._typed(self._made(self._sources[name]), *self._sources[name][0])

    def missing(self, resident: Collection[str]) -> Iterator[tuple[str, str]]:
        """What this rank should have and ``resident`` parameters lack: (name, a tensor that it is made of)."""
        if self._config.layout == "hf":
            yield from ((name, name) for name in self._files if name not in resident)
        for name, ((place, tensor), *_) in self._sources.items():
            lacking = [one for one in self._products.get(name, [name]) if one not in resident]
            if lacking and not self._is_blank_bias(place, tensor):
                yield from ((one, tensor) for one in lacking)

    def _is_blank_bias(self, place: Place, tensor: str) -> bool:
        """GPTQ writes a bias of zeros for layers that have none."""
        return self._model.method == "gptq" and place.suffix == "bias" and not self._files.tensor(tensor).any()

    # Making one parameter

    def _made(self, sources: Sources) -> torch.Tensor:
        """Cut and fused, as the checkpoint stores the values."""
        place, name = sources[0]
        if not place.is_of_experts:
            return self._layer(sources, self._ranks)
        within = self._ranks.within_experts
        if place.expert is None:
            whole = self._files.tensor(name)
            return experts.of_a_stack(whole[self._ranks.experts(len(whole))], place, within)
        by_expert: dict[int, Sources] = {}
        for one, stored in sources:
            by_expert.setdefault(-1 if one.expert is None else one.expert, []).append((one, stored))
        here = self._ranks.experts(max(by_expert) + 1)
        if absent := [expert for expert in here if expert not in by_expert]:
            raise NotOnDisk(f"{place.suffix} of expert {absent[0]} of {place.parameter}")
        return experts.stacked([self._layer(by_expert[expert], within) for expert in here], place)

    def _layer(self, sources: Sources, ranks: Ranks) -> torch.Tensor:
        """One layer's, or one expert's."""
        place, name = sources[0]
        way = way_of(place.layer)
        if place.suffix == "kv_scale":
            return self._files.tensor(name).reshape((1,) if self._model.method == "compressed-tensors" else ())
        if place.suffix == "sinks":
            return ranks.share(self._files.tensor(name), 0)
        if way is None:
            raise NotCompared(f"no rule for {place.layer.rpartition('.')[2]}.{place.kind}")
        if way == "vocabulary":
            return ranks.vocabulary(self._files.tensor(name))
        if not is_linear(place.layer):
            return self._files.tensor(name)
        parts, axes = self._parts(sources)
        heads = [None, self._model.kv_heads, self._model.kv_heads] if way == "heads" else [None] * len(parts)
        shares = [cut(part, way, axes, ranks, most) for part, most in zip(parts, heads, strict=True)]
        return fused(shares, axes, last=self._is_last(place, name))

    def _parts(self, sources: Sources) -> tuple[list[torch.Tensor], Axes]:
        """A layer's parts, whole, in order."""
        place, name = sources[0]
        by_part = {one.part: stored for one, stored in sources}
        wanted = [None] if place.part is None else list(range(PARTS.get(place.layer.rpartition(".")[2], 1)))
        if absent := [part for part in wanted if part not in by_part]:
            raise NotOnDisk(f"part {absent[0]} of {place.parameter}, beside {name},")
        tensors = [self._files.tensor(by_part[part]) for part in wanted]
        if self._model.is_gpt2 and place.suffix == "weight":
            tensors = [tensor.t() for tensor in tensors]
        axes = axes_of(place.suffix, tensors[0], activation_order=self._model.activation_order)
        if place.part is None:
            keys = self._model.kv_heads
            tensors = in_parts(tensors[0], place.layer, axes.outputs, (self._model.heads, keys, keys))
        return tensors, axes

    def _is_last(self, place: Place, name: str) -> bool:
        """Engines have one input scale for experts, and for layers of integers, where the last part loaded wins."""
        if place.suffix != "input_scale":
            return place.suffix in _LAST
        return place.is_of_experts or self._files.is_int8(name.removesuffix("input_scale") + "weight")

    def _quantized(self, weight: str) -> dict[str, torch.Tensor]:
        """Parameter → what the online quantization makes of the checkpoint's own values."""
        values = self._made(self._sources[weight])
        made = quantized(values, self._config.quantization, self._cast(values[:0]).dtype)
        return {weight + ending: tensor for ending, tensor in made.items()}

    # Dtypes

    def _typed(self, tensor: torch.Tensor, place: Place, name: str) -> torch.Tensor:
        """In the dtype that engines have it in."""
        is_of_bytes = place.suffix == "weight_scale" and name.removesuffix("_scale") in self._files
        is_kv_scale = place.suffix == "kv_scale" and self._model.method == "compressed-tensors"
        is_float32 = place.suffix in _FLOAT32 or place.module in _FLOAT32_MODULES
        return tensor.float() if is_of_bytes or is_kv_scale or is_float32 else self._cast(tensor)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the dtype that is asked for, if any; what is not floating point stays."""
        dtype = self._config.dtype
        if dtype == "auto" or tensor.dtype not in _FLOATING:
            return tensor
        target: torch.dtype = getattr(torch, dtype)
        return tensor.to(target)
