"""The naive reference: this rank's parameters sliced out of whole tensors with plain torch, to check the loader by.

Owns nothing that the loader uses and uses nothing of it: no plan, no tables, no reading of headers. It opens the files
with the safetensors library and knows, for each module by the last word of its name, how the engines cut and fuse it.
One tensor at a time; speed is no aim. Where it has no rule it says so (:class:`NotCompared`) and never guesses. A new
rule is one method and its line in ``RULES``. Used by ``weightcached verify --against-disk``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open

from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import CheckpointError

_GEMMA = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        *_GEMMA,
    }
)
"""Those whose modules the rules below are true of, in layout ``fused``."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "MixtralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32},
    "GemmaForCausalLM": {"num_key_value_heads": 16, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "Gemma3ForCausalLM": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
"""What Transformers takes where ``config.json`` does not say."""

_VOCABULARY_MULTIPLE = 64
_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class NotCompared(Exception):
    """The reference has no rule for this parameter; the text says why."""


class NotOnDisk(Exception):
    """The parameter would need a tensor that no file has; the text names it."""


class Reference:
    """Of one checkpoint and one rank's config. A context manager: files are open meanwhile."""

    def __init__(self, model_dir: Path, config: CacheConfig) -> None:
        """Raises CheckpointError when the files cannot be opened."""
        self._config = config
        stated = {**config.model.get("text_config", {}), **config.model}
        self._model = {**_DEFAULTS.get(config.architecture, {}), **{k: v for k, v in stated.items() if v is not None}}
        self._size, self._rank = config.parallel.tp_size, config.parallel.tp_rank
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        """Tensor name → the open file that has it."""
        self.used: set[str] = set()
        """Tensors that some parameter needed so far."""
        try:
            for path in _files(model_dir):
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
        except (OSError, ValueError, SafetensorError) as error:
            self._stack.close()
            raise CheckpointError("the reference cannot open the checkpoint", found=error, where=model_dir) from error

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def tensors(self) -> frozenset[str]:
        """Every tensor of the files."""
        return frozenset(self._files)

    def parameter(self, name: str) -> torch.Tensor:
        """The parameter of that name, in memory of its own. Raises NotCompared or NotOnDisk."""
        if self._config.layout == "hf":
            return self._cast(self._tensor(name))
        if self._config.layout != "fused" or self._config.architecture not in ARCHITECTURES:
            raise NotCompared(f"no rules for {self._config.architecture} in layout {self._config.layout}")
        if self._config.model.get("quantization_config") is not None:
            raise NotCompared("no rules for quantized checkpoints")
        module, _, kind = name.rpartition(".")
        quantization = self._config.quantization
        if quantization.method == "none":
            return self._cast(self._plain(module, kind))
        if (quantization.method, quantization.granularity) != ("fp8", "channel"):
            raise NotCompared(f"no rules for quantization {quantization.spelled}")
        if module.endswith("routed_experts"):
            raise NotCompared("no rules for quantized experts")
        if kind == "weight_scale":
            return _fp8(self._plain(module, "weight"))[1]
        if kind == "weight" and module.rpartition(".")[2] in self.LINEAR:
            return _fp8(self._plain(module, "weight"))[0]
        return self._cast(self._plain(module, kind))

    def _plain(self, module: str, kind: str) -> torch.Tensor:
        """Cut and fused, as the checkpoint stores the values."""
        rule = self.RULES.get(module.rpartition(".")[2])
        if rule is None or kind not in ("weight", "bias", "w13_weight", "w2_weight"):
            raise NotCompared(f"no rule for {module.rpartition('.')[2]}.{kind}")
        return rule(self, module, kind)

    # The rules

    def _whole(self, module: str, kind: str) -> torch.Tensor:
        return self._tensor(f"{module}.{kind}")

    def _heads(self, module: str, kind: str) -> torch.Tensor:
        """Query, key and value heads of this rank; key and value heads repeat where there are more ranks than those."""
        queries: int = self._model["num_attention_heads"]
        keys: int = self._model.get("num_key_value_heads", queries)
        parts = []
        for tensor, heads in zip(self._projections(module, kind, queries, keys), (queries, keys, keys), strict=True):
            by_head = tensor.reshape(heads, -1, *tensor.shape[1:])
            by_head = by_head.repeat_interleave(max(1, self._size // heads), dim=0)
            parts.append(self._share(by_head).flatten(0, 1))
        return torch.cat(parts)

    def _projections(self, module: str, kind: str, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        """Query, key and value, which may be one tensor on disk."""
        if f"{module}.{kind}" not in self._files:
            return self._beside(module, kind, "q_proj", "k_proj", "v_proj")
        tensor = self._tensor(f"{module}.{kind}")
        head = tensor.shape[0] // (queries + 2 * keys)
        first_key, first_value = queries * head, (queries + keys) * head
        return tensor[:first_key], tensor[first_key:first_value], tensor[first_value:]

    def _gate_and_up(self, module: str, kind: str) -> torch.Tensor:
        if f"{module}.{kind}" in self._files:
            parts = self._tensor(f"{module}.{kind}").chunk(2)
        else:
            parts = self._beside(module, kind, "gate_proj", "up_proj")
        return torch.cat([self._share(part) for part in parts])

    def _columns(self, module: str, kind: str) -> torch.Tensor:
        """A bias is added once, by the engine: every rank has all of it."""
        tensor = self._tensor(f"{module}.{kind}")
        return self._share(tensor, dim=1) if kind == "weight" else tensor

    def _vocabulary(self, module: str, kind: str) -> torch.Tensor:
        tied = module == "lm_head" and self._model.get("tie_word_embeddings", False)
        tensor = self._tensor(f"{'model.embed_tokens' if tied else module}.{kind}")
        padding = -tensor.shape[0] % _VOCABULARY_MULTIPLE
        return self._share(torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]))

    def _experts(self, module: str, kind: str) -> torch.Tensor:
        """Mixtral's, each cut like any layer, then stacked."""
        if self._config.parallel.ep_size > 1:
            raise NotCompared("no rules for expert parallelism")
        made = []
        for expert in range(self._model["num_local_experts"]):
            gate, up, down = self._beside(module, "weight", *(f"{expert}.{part}" for part in ("w1", "w3", "w2")))
            made.append(
                torch.cat([self._share(gate), self._share(up)]) if kind == "w13_weight" else self._share(down, dim=1)
            )
        return torch.stack(made)

    RULES: ClassVar[dict[str, Callable[[Reference, str, str], torch.Tensor]]] = {
        "qkv_proj": _heads,
        "gate_up_proj": _gate_and_up,
        "o_proj": _columns,
        "down_proj": _columns,
        "embed_tokens": _vocabulary,
        "lm_head": _vocabulary,
        "routed_experts": _experts,
        "gate": _whole,
        "norm": _whole,
        "q_norm": _whole,
        "k_norm": _whole,
        "input_layernorm": _whole,
        "post_attention_layernorm": _whole,
        "pre_feedforward_layernorm": _whole,
        "post_feedforward_layernorm": _whole,
    }
    """The last word of a module's name → how its parameters come about."""

    LINEAR: ClassVar[frozenset[str]] = frozenset({"qkv_proj", "gate_up_proj", "o_proj", "down_proj"})
    """Modules whose weights an online quantization takes."""

    # What the rules are made of

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise NotOnDisk(name)
        self.used.add(name)
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def _beside(self, module: str, kind: str, *names: str) -> tuple[torch.Tensor, ...]:
        """The tensors of other modules that have the same owner."""
        owner = module.rpartition(".")[0]
        return tuple(self._tensor(f"{owner}.{name}.{kind}") for name in names)

    def _share(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if tensor.shape[dim] % self._size:
            raise NotCompared(f"{self._size} ranks cannot share {tensor.shape[dim]} evenly")
        return tensor.chunk(self._size, dim)[self._rank]

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._config.dtype
        if dtype == "auto" or tensor.dtype not in _FLOATING:
            return tensor
        target: torch.dtype = getattr(torch, dtype)
        return tensor.to(target)


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and one float32 scale for each output channel."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _files(model_dir: Path) -> Iterator[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        yield from (model_dir / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))
    elif (model_dir / "model.safetensors").exists():
        yield model_dir / "model.safetensors"
    else:
        yield from model_dir.glob("*.safetensors")
