"""What ``config.json`` says of a model, as far as names and cuts depend on it, with the defaults of Transformers."""

from __future__ import annotations

from typing import Any

from weightcached.protocol.config import CacheConfig

_GEMMA = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
_BERT = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification")
_WITH_EXPERTS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
_DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_OTHERS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ARCHITECTURES = frozenset((*_GEMMA, *_BERT, *_WITH_EXPERTS, *_DEEPSEEK, *_OTHERS, "GPT2LMHeadModel"))
"""Those that the rules of this package are true of, in layout ``fused``."""

_ENDS_EVERYWHERE = frozenset((*_GEMMA, *_WITH_EXPERTS, "GPT2LMHeadModel"))
"""vLLM builds embedding, last norm and head of these on every pipeline stage."""

_TIED = frozenset((*_GEMMA, *_BERT, "GPT2LMHeadModel"))
"""Whose classes in Transformers tie embedding and head unless told otherwise."""

_KV_HEADS = {
    "MistralForCausalLM": 8,
    "MixtralForCausalLM": 8,
    "Qwen2ForCausalLM": 32,
    "Qwen3ForCausalLM": 32,
    "Qwen2MoeForCausalLM": 16,
    "Qwen3MoeForCausalLM": 4,
    "GptOssForCausalLM": 8,
    "GemmaForCausalLM": 16,
    "Gemma2ForCausalLM": 4,
    "Gemma3ForCausalLM": 4,
}
"""Where ``config.json`` does not say; as many as query heads for others."""


class Model:
    """One model. Sizes are the ``config.json``'s, unchecked: the loader has refused what cannot be."""

    def __init__(self, config: CacheConfig) -> None:
        nested = config.model.get("text_config") if config.architecture == "Gemma3ForCausalLM" else None
        stated = {key: value for key, value in {**config.model, **(nested or {})}.items() if value is not None}
        self.architecture = config.architecture
        self.is_bert, self.is_gpt2 = config.architecture in _BERT, config.architecture == "GPT2LMHeadModel"
        self.is_gpt_oss = config.architecture == "GptOssForCausalLM"
        self.heads: int = stated["n_head" if self.is_gpt2 else "num_attention_heads"]
        self.layers: int = stated["n_layer" if self.is_gpt2 else "num_hidden_layers"]
        kv_heads = _KV_HEADS.get(config.architecture, self.heads)
        self.kv_heads: int = self.heads if self.is_bert or self.is_gpt2 else stated.get("num_key_value_heads", kv_heads)
        self.is_tied: bool = stated.get("tie_word_embeddings", config.architecture in _TIED)
        self.ends_everywhere = config.architecture in _ENDS_EVERYWHERE
        self.quantization: dict[str, Any] | None = stated.get("quantization_config")

    @property
    def embedding(self) -> str:
        """The engine's name of the words' embedding."""
        if self.is_bert:
            return "bert.embeddings.word_embeddings.weight"
        return "transformer.wte.weight" if self.is_gpt2 else "model.embed_tokens.weight"

    @property
    def head(self) -> str | None:
        """The engine's name of the output head, which is the embedding where these are tied; ``None``: it has none."""
        if self.is_bert:
            return "mlm_head.decoder.weight" if self.architecture == "BertForMaskedLM" else None
        return None if self.architecture == "Gemma2ForCausalLM" else "lm_head.weight"

    @property
    def method(self) -> str | None:
        """What the checkpoint itself is quantized with."""
        return None if self.quantization is None else str(self.quantization.get("quant_method"))

    @property
    def activation_order(self) -> bool:
        """Whether each input of a quantized weight says which group it is of, so that every rank needs all groups."""
        if self.method == "gptq" and self.quantization is not None:
            return bool(self.quantization.get("desc_act")) and self.quantization.get("group_size") != -1
        groups = (self.quantization or {}).get("config_groups") or {}
        weights = [group["weights"] for group in groups.values()]
        return any(one.get("strategy") == "group" and one.get("actorder") in ("group", "dynamic") for one in weights)
