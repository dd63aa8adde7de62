"""Architectures of the ``fused`` layout: one small declarative table each, found by the name ``config.json`` gives."""

from __future__ import annotations

from weightcached.loader.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from weightcached.loader.architectures.gpt_oss import GPT_OSS
from weightcached.loader.architectures.llama import LLAMA, MISTRAL
from weightcached.loader.architectures.mixtral import MIXTRAL
from weightcached.loader.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from weightcached.loader.architectures.table import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    name: table
    for table in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
    for name in table.names
}
"""Architecture name → table."""
