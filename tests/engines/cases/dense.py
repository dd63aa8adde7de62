"""Dense decoders, and encoders.

Of Gemma 3 only the text model: a case for the one with images would have to build its vision tower, too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tests.engines.cases.case import DECODER, Case, Tensors
from tests.support.checkpoints import raw_tensor

LLAMA = {**DECODER, "model_type": "llama"}
SIX_HEADS = {**LLAMA, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 515}
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 2, "n_positions": 256, "vocab_size": 515}
BERT = {**DECODER, "model_type": "bert", "vocab_size": 515, "num_labels": 3}
STAGES: Mapping[str, Any] = {"tp_sizes": (2,), "pp_sizes": (2,)}


def stored_as(code: str, dtype: str) -> Callable[[dict[str, Any], Tensors], None]:
    """The edit that stores a model in another dtype. vLLM runs those of float32 in bfloat16, unless told otherwise."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config["dtype"] = dtype
        tensors |= {name: raw_tensor(name, tensor.shape, code) for name, tensor in tensors.items()}

    return edit


CASES = (
    Case("llama", LLAMA),
    Case("llama-tied", {**LLAMA, "tie_word_embeddings": True, "vocab_size": 515}),
    Case("llama-biased", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    Case("llama-of-six-heads", SIX_HEADS, tp_sizes=(3, 6)),
    Case("llama-f16", LLAMA, edit=stored_as("F16", "float16")),
    Case("llama-f32", LLAMA, edit=stored_as("F32", "float32"), options={"dtype": "bfloat16"}),
    Case("llama-files", {**LLAMA, "vocab_size": 515}, files=3),
    Case("mistral", {**DECODER, "model_type": "mistral", "head_dim": 64}),
    Case("qwen2", {**DECODER, "model_type": "qwen2"}),
    Case("qwen3", {**DECODER, "model_type": "qwen3", "head_dim": 64}),
    Case("phi3", {**DECODER, "model_type": "phi3", "pad_token_id": 0}),
    Case("phi3-tied", {**DECODER, "model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": True}),
    Case("gemma", {**DECODER, "model_type": "gemma", "head_dim": 64}),
    Case("gemma2", {**DECODER, "model_type": "gemma2", "head_dim": 64, "vocab_size": 515}),
    Case("gemma2-biased", {**DECODER, "model_type": "gemma2", "head_dim": 64, "attention_bias": True}),
    Case("gemma3", {**DECODER, "model_type": "gemma3_text", "head_dim": 64}),
    Case("gpt2", GPT2),
    Case("gpt2-untied", {**GPT2, "tie_word_embeddings": False, "n_inner": 384}),
    Case("olmo2", {**DECODER, "model_type": "olmo2", "vocab_size": 515}),
    Case("phi3-stages", {**DECODER, "model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": True}, **STAGES),
    Case("gemma-stages", {**DECODER, "model_type": "gemma", "head_dim": 64}, **STAGES),
    Case("gemma2-stages", {**DECODER, "model_type": "gemma2", "head_dim": 64}, **STAGES),
    Case("gemma3-stages", {**DECODER, "model_type": "gemma3_text", "head_dim": 64}, **STAGES),
    Case("gpt2-stages", GPT2, **STAGES),
    Case("gpt2-untied-stages", {**GPT2, "tie_word_embeddings": False}, **STAGES),
    Case("olmo2-stages", {**DECODER, "model_type": "olmo2"}, **STAGES),
    Case("bert", BERT, auto_class="AutoModel"),
    # vLLM has tied words at TP 1 only: it copies one rank's share of the embeddings into the whole projection.
    Case("bert-words", BERT, auto_class="AutoModelForMaskedLM", tp_sizes=(1,)),
    Case("bert-words-untied", {**BERT, "tie_word_embeddings": False}, auto_class="AutoModelForMaskedLM"),
    Case("bert-sequences", BERT, auto_class="AutoModelForSequenceClassification"),
    Case("bert-tokens", BERT, auto_class="AutoModelForTokenClassification"),
)
