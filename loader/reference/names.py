"""Where each tensor of the files belongs: the name that engines have it under, and which part of that it is.

As in an engine's loader, only names decide. What a rank need not have is told apart: nobody needs it
(:func:`is_left_out`), or another pipeline stage does (:func:`is_elsewhere`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightcached.loader.reference.model import Model
from weightcached.loader.reference.ranks import Ranks

Parts = Mapping[str, tuple[str, int]]

_GROUPED: Parts = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_BERT: Parts = {"query": ("qkv_proj", 0), "key": ("qkv_proj", 1), "value": ("qkv_proj", 2)}
_LATENT: Parts = {"q_a_proj": ("fused_qkv_a_proj", 0), "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1)}
_GATED: Parts = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_EXPERT: Parts = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("w13", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("w2", 0)),
}
PARTS = {"qkv_proj": 3, "c_attn": 3, "fused_qkv_a_proj": 2, "gate_up_proj": 2, "w13": 2}
"""The last word of a fused module's name → how many parts it has."""

_OF_AN_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.(?P<suffix>\w+)")
_STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up|down)_proj(?:_(?P<ending>\w+))?")
_STACKED_SUFFIXES = {None: "stack", "bias": "bias", "blocks": "blocks", "scales": "block_scales"}
_STACKED_KINDS = {None: "weight", "bias": "bias", "blocks": "weight", "scales": "weight_scale"}

_KV_SCALE = re.compile(
    r"(?P<attention>.+?\.self_attn)\.(?:attn\.|[qkv]_proj\.|qk(?:qk)?v_proj\.)?"
    r"(?:(?P<kind>[qkv]|prob)(?:_scale|_cache\.scale|\.scale|_output_scale)|(?P<both>kv)_scale)"
)
_KV_OUTPUT_SCALE = re.compile(r"(?P<attention>.+?\.self_attn)\.(?P<kind>[qkv])_proj\.output_scale")
_KV_ZERO_POINT = re.compile(r".+\.self_attn\.(?:attn\.)?[qkv]_zero_point")

_MASKED_WORDS = {
    "cls.predictions.transform.dense.": "mlm_head.dense.",
    "cls.predictions.transform.LayerNorm.": "mlm_head.layer_norm.",
    "cls.predictions.decoder.": "mlm_head.decoder.",
    "cls.predictions.": "mlm_head.decoder.",
}
_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class Place:
    """What one tensor is: part ``part`` of the parameter ``module.kind``."""

    module: str
    """The engine's."""
    kind: str
    suffix: str
    """What the files call it after the module's name: says which axis is which."""
    part: int | None = None
    """``None``: all of it, whether it has parts or not."""
    expert: int | None = None
    """``None``: all experts, or no expert."""

    @property
    def parameter(self) -> str:
        return f"{self.module}.{self.kind}" if self.module else self.kind

    @property
    def is_of_experts(self) -> bool:
        return self.module.endswith(".routed_experts")

    @property
    def layer(self) -> str:
        """The linear layer's name, or whatever other module's: of experts, ``….w13`` or ``….w2``."""
        return f"{self.module}.{self.kind.partition('_')[0]}" if self.is_of_experts else self.module


Sources = list[tuple[Place, str]]
"""Where tensors belong, and their names in the files."""


def belonging(names: Iterable[str], model: Model, ranks: Ranks) -> dict[str, Sources]:
    """A rank's parameters, each with the tensors that it is made of."""
    sources: dict[str, Sources] = {}
    kept = [name for name in names if not is_left_out(name, model)]
    has_latent_queries = any(".q_a_proj." in name for name in kept)
    for name in kept:
        for place in places(name, model, has_latent_queries=has_latent_queries):
            sources.setdefault(place.parameter, []).append((place, name))
    if model.is_tied and model.head is not None and model.embedding in sources:
        ((_, name),) = sources[model.embedding]
        module, _, kind = model.head.rpartition(".")
        sources[model.head] = [(Place(module, kind, "weight"), name)]
    return {name: found for name, found in sources.items() if not is_elsewhere(name, model, ranks)}


def places(name: str, model: Model, *, has_latent_queries: bool) -> list[Place]:
    """One place; two for a scale of keys and values. ``has_latent_queries``: attention as DeepSeek's with a rank."""
    if model.method is not None and (match := _KV_OUTPUT_SCALE.fullmatch(name) or _KV_SCALE.fullmatch(name)):
        found = match.groupdict()
        kinds = ("k", "v") if found.get("both") else (found["kind"],)
        return [Place(f"{match['attention']}.attn", f"{kind}_scale", "kv_scale") for kind in kinds]
    name = _respelled(name, model)
    if (match := _OF_AN_EXPERT.fullmatch(name)) and match["projection"] in _EXPERT:
        weight, part = _EXPERT[match["projection"]]
        suffix = match["suffix"]
        return [Place(f"{match['experts']}.routed_experts", f"{weight}_{suffix}", suffix, part, int(match["expert"]))]
    if (match := _STACKED.fullmatch(name)) and match["ending"] in _STACKED_SUFFIXES:
        weight = "w13" if match["projection"] == "gate_up" else "w2"
        kind, suffix = f"{weight}_{_STACKED_KINDS[match['ending']]}", _STACKED_SUFFIXES[match["ending"]]
        suffix = "turned_stack" if suffix == "stack" and model.is_gpt_oss else suffix
        return [Place(f"{match['experts']}.routed_experts", kind, suffix)]
    module, _, suffix = name.rpartition(".")
    owner, _, word = module.rpartition(".")
    parts: Parts = _GATED
    if model.is_bert:
        parts = _BERT
    elif model.architecture.startswith("Deepseek"):
        parts = {**_GATED, **(_LATENT if has_latent_queries else {})}
    elif not model.is_gpt2:
        parts = {**_GATED, **_GROUPED}
    if word not in parts:
        return [Place(module, suffix, suffix)]
    fused, part = parts[word]
    return [Place(f"{owner}.{fused}", suffix, suffix, part)]


def _respelled(name: str, model: Model) -> str:
    """As the engine's modules are called."""
    if model.is_gpt2 and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"
    if model.is_gpt_oss:
        return re.sub(r"^model\.embed_tokens\.", "model.embedding.", name.replace(".self_attn.", ".attn."))
    if model.architecture == "MixtralForCausalLM":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if model.is_bert:
        name = re.sub(r"\.LayerNorm\.gamma$", ".LayerNorm.weight", name)
        name = re.sub(r"\.LayerNorm\.beta$", ".LayerNorm.bias", name)
        if model.architecture == "BertModel":
            return name if name.startswith("model.") else f"model.{name}"
        for theirs, ours in _MASKED_WORDS.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
    return name


def is_left_out(name: str, model: Model) -> bool:
    """Whether no rank needs this tensor: what engines compute themselves, have tied, or do not use."""
    layer, suffix = layer_of(name), name.rpartition(".")[2]
    if name.endswith(_ROTARY) or (model.is_tied and name.startswith(("lm_head.", "cls.predictions.decoder."))):
        return True
    if layer is not None and layer >= model.layers and model.architecture.startswith("Deepseek"):
        return True  # it predicts more tokens at once
    if model.is_gpt2 and name.endswith((".attn.bias", ".attn.masked_bias")):
        return True
    if model.is_bert:
        pooler = "pooler.dense." in name and model.architecture != "BertForSequenceClassification"
        unused = name.startswith("cls.seq_relationship.") or name == "cls.predictions.decoder.bias"
        return pooler or unused or name.endswith("embeddings.position_ids")
    if model.method is None:
        return False
    if suffix == "g_idx" and not model.activation_order:
        return True  # one group after the other
    is_expert = _OF_AN_EXPERT.fullmatch(name) is not None
    return (suffix == "weight_shape" and is_expert) or _KV_ZERO_POINT.fullmatch(name) is not None


def is_elsewhere(parameter: str, model: Model, ranks: Ranks) -> bool:
    """Whether an engine's parameter is another stage's."""
    if (layer := layer_of(parameter)) is not None:
        return layer not in ranks.layers(model.layers)
    if model.ends_everywhere:
        return False
    is_first, is_last = ranks.stage == 0, ranks.stage == ranks.stages - 1
    if re.search(r"(^|\.)(embed_tokens|embeddings)\.", parameter):
        return not (is_first or (is_last and model.is_tied and not model.is_bert))
    return not is_last


def layer_of(name: str) -> int | None:
    """The first number in a dotted name."""
    return next((int(word) for word in name.split(".") if word.isdecimal()), None)
