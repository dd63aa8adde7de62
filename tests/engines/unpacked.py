"""A worker of vLLM that leaves matrices as they are, whoever has loaded them: imported by such a worker alone.

The kernels that multiply with packed matrices round otherwise, so that tokens of two engines are comparable only where
both have the same. `vllm_generate.py` does without this for an engine in its own process.
"""

from tests.engines import looking
from weightcached.client.vllm.in_place import without_packing

without_packing().__enter__()


class Looking(looking.Looking):
    """As the other; a worker finds its class by name, and imports this module for it."""
