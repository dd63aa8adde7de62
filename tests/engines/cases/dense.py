"""Dense decoders, and encoders.

Of Gemma 3 only the text model: a case for the one with images would have to build its vision tower, too.
"""

from collections.abc import Mapping
from typing import Any

from tests.engines.cases.case import DECODER, Case

LLAMA = {**DECODER, "model_type": "llama"}
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 8, "n_layer": 2, "n_positions": 256, "vocab_size": 515}
BERT = {**DECODER, "model_type": "bert", "vocab_size": 515, "num_labels": 3}
STAGES: Mapping[str, Any] = {"tp_sizes": (2,), "pp_sizes": (2,)}

CASES = (
    Case("llama", LLAMA),
    Case("llama-tied", {**LLAMA, "tie_word_embeddings": True, "vocab_size": 515}),
    Case("llama-biased", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
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
