"""Dense decoders."""

from tests.engines.cases.case import DECODER, Case

LLAMA = {**DECODER, "model_type": "llama"}

CASES = (
    Case("llama", LLAMA),
    Case("llama-tied", {**LLAMA, "tie_word_embeddings": True, "vocab_size": 515}),
    Case("llama-biased", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    Case("llama-files", {**LLAMA, "vocab_size": 515}, files=3),
    Case("mistral", {**DECODER, "model_type": "mistral", "head_dim": 64}),
    Case("qwen2", {**DECODER, "model_type": "qwen2"}),
    Case("qwen3", {**DECODER, "model_type": "qwen3", "head_dim": 64}),
)
