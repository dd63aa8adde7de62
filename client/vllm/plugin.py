"""What vLLM calls in each of its processes: entry point `weightcached` of the group `vllm.general_plugins`.

Owns the registration of the load format. Without ``--load-format weightcached`` nothing else of this package is used.
"""

from __future__ import annotations

from weightcached.client.vllm.options import LOAD_FORMAT


def register() -> None:
    """Make ``--load-format weightcached`` known. Safe to call again."""
    from vllm.model_executor.model_loader import register_model_loader

    from weightcached.client.vllm.loader import WeightcachedLoader

    register_model_loader(LOAD_FORMAT)(WeightcachedLoader)
