"""Architectures of the ``fused`` layout: one small declarative table each, found by the name ``config.json`` gives."""

from __future__ import annotations

from weightcached.loader.architectures.bert import BERT, BERT_MASKED, BERT_SEQUENCES, BERT_TOKENS
from weightcached.loader.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from weightcached.loader.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from weightcached.loader.architectures.gpt2 import GPT2
from weightcached.loader.architectures.gpt_oss import GPT_OSS
from weightcached.loader.architectures.llama import LLAMA, MISTRAL
from weightcached.loader.architectures.mixtral import MIXTRAL
from weightcached.loader.architectures.olmo import OLMO2
from weightcached.loader.architectures.phi import PHI3
from weightcached.loader.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from weightcached.loader.architectures.table import Architecture

TABLES = (
    BERT,
    BERT_MASKED,
    BERT_SEQUENCES,
    BERT_TOKENS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)

ARCHITECTURES: dict[str, Architecture] = {name: table for table in TABLES for name in table.names}
"""Architecture name → table."""

WITHOUT_A_TABLE = (
    "--engine vllm has vLLM make the layout (any TP size), --engine transformers Transformers (one rank); "
    "loader/architectures/README.md, in the sources, says how to add a table"
)
