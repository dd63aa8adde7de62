"""Plans against the oracle: what vLLM's own loader made of the same checkpoints, on every rank, byte for byte.

Executed naively here, in numpy; the real executor is compared with the naive one elsewhere.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import naive
from tests.support.checkpoints import ORACLE, ORACLE_CASES, make_checkpoint
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.plan import LoadPlan, make_plan
from weightcached.protocol.config import build_config


def plan_of(directory: Path, **options) -> LoadPlan:
    with open_checkpoint(directory) as checkpoint:
        return make_plan(checkpoint.tensors, checkpoint.config, build_config(directory, **options))


@pytest.mark.parametrize("name", ["qwen2", "llama-sharded"])
def test_checkpoints_made_here_are_those_of_the_oracle_s_own_script(tmp_path, name):
    subprocess.run([sys.executable, ORACLE / "make_checkpoints.py", tmp_path, name], check=True, capture_output=True)
    theirs, ours = tmp_path / name, make_checkpoint(tmp_path / "ours", name)
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert files == sorted(path.name for path in ours.glob("*.safetensors"))
    assert all((theirs / file).read_bytes() == (ours / file).read_bytes() for file in files)
    index = "model.safetensors.index.json"
    if (theirs / index).exists():
        assert json.loads((theirs / index).read_text()) == json.loads((ours / index).read_text())


@pytest.fixture(scope="module", params=ORACLE_CASES)
def case(request, tmp_path_factory):
    """(name, directory) of one of the oracle's checkpoints."""
    return request.param, make_checkpoint(tmp_path_factory.mktemp("oracle") / request.param, request.param)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_holds_what_the_engine_holds(case, size):
    name, directory = case
    listed = json.loads((ORACLE / name / f"tp{size}.json").read_text())
    assert set(listed) == {str(rank) for rank in range(size)}
    for rank in range(size):
        plan = plan_of(directory, layout="fused", tp_size=size, tp_rank=rank)
        digests = naive.short_digests(naive.execute(plan, directory))
        ours = {
            parameter.name: [parameter.dtype, list(parameter.shape), digests[parameter.name]]
            for parameter in plan.parameters
            if parameter.alias_of is None
        }
        assert ours == listed[str(rank)]["parameters"]
        aliases = {p.name: p.alias_of for p in plan.parameters if p.alias_of is not None}
        assert aliases == listed[str(rank)]["aliases"]


def test_sharded_files_make_the_same_parameters_as_one_file(tmp_path):
    made = []
    for name in ("llama", "llama-sharded"):
        directory = make_checkpoint(tmp_path / name, name)
        plan = plan_of(directory, layout="fused", tp_size=2, tp_rank=1)
        made.append(naive.short_digests(naive.execute(plan, directory)))
    assert made[0] == made[1]
    assert len(made[0]) == 27


@pytest.mark.parametrize("name", ["mixtral", "phi3", "llama-sharded"])
def test_layout_hf_takes_any_architecture_as_it_is_on_disk(tmp_path, name):
    directory = make_checkpoint(tmp_path, name)
    plan = plan_of(directory, layout="hf", tp_size=1, tp_rank=0)
    listed = json.loads((ORACLE / name / "tensors.json").read_text())
    on_disk = {tensor: shape for tensors in listed.values() for tensor, (_, shape) in tensors.items()}
    assert {p.name: list(p.shape) for p in plan.parameters} == on_disk
    assert [p.name for p in plan.parameters] == sorted(on_disk)
    assert plan.accounting.loaded == plan.accounting.expected == on_disk.keys()
