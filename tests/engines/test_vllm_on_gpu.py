"""What is different where vLLM computes on a GPU comes to the same parameters: a model that is built without memory for
them, and copies for layers whose post-processing may write. By real vLLM, on a CPU: no GPU has seen it.
"""

from __future__ import annotations

import pytest

from tests.engines.cases import CASES
from tests.engines.engine import running

pytestmark = pytest.mark.timeout(600)

STORED = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def both():
    with running("vllm_on_gpu.py") as engine:
        yield engine


@pytest.mark.parametrize(("name", "copies"), [("llama-tied", False), ("mixtral", True), ("llama-awq", True)])
def test_parameters_are_those_of_the_way_in_host_memory(both, checkpoint, name, copies):
    case = STORED[name]
    answer = both.ask(model=str(checkpoint(case)), options=case.engine_options)
    host, gpu = answer["cpu"], answer["gpu"]
    assert gpu["parameters"] == host["parameters"]
    assert gpu["differing"] == []  # what is mapped was not written to
    assert gpu["taken_nbytes"] < host["taken_nbytes"] / 4
    assert (gpu["copied_nbytes"] > 0) == copies
    assert gpu["shared_nbytes"] > 0
    assert host["copied_nbytes"] == 0
