"""What we hold is what vLLM's loader holds: names, shapes, dtypes, bytes and ties, on every rank of every case."""

from __future__ import annotations

import pytest

from tests.engines import checkpoints
from tests.engines.cases import CASES, Rank
from tests.engines.cases.case import Case
from tests.engines.cases.dense import LLAMA, SIX_HEADS
from tests.engines.compare import loaded, served, unlike_the_reference
from tests.engines.engine import EngineError
from tests.engines.held import differences
from weightcached.protocol.errors import WeightCacheError


def _here(case: Case) -> list[pytest.MarkDecorator]:
    """Skipped only for what the processor lacks, with the reason."""
    return [pytest.mark.skipif(case.why_not_here is not None, reason=str(case.why_not_here))]


EVERY_CASE = [pytest.param(case, id=case.name, marks=_here(case)) for case in CASES]
EVERY_RANK = [
    pytest.param(case, rank, id=f"{case.name}-{rank}", marks=_here(case)) for case in CASES for rank in case.ranks()
]


@pytest.mark.timeout(300)  # the first starts the engine
@pytest.mark.parametrize(("case", "rank"), EVERY_RANK)
def test_our_loader_makes_what_the_engine_s_makes(vllm, checkpoint, case, rank):
    model = checkpoint(case)
    assert differences(vllm.held(model, case, rank), loaded(model, case, rank)) == []
    assert unlike_the_reference(model, case, rank) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", EVERY_CASE)
def test_a_daemon_gives_an_engine_what_its_own_loader_would(vllm, checkpoint, tmp_path, case):
    """At the last rank: where a mistaken rank, group or padding shows most."""
    model, rank = checkpoint(case), list(case.ranks())[-1]
    assert differences(vllm.held(model, case, rank), served(model, case, rank, tmp_path / "run")) == []


@pytest.mark.timeout(300)
def test_another_rank_s_shard_is_seen_to_differ(vllm, checkpoint):
    """The comparison can fail: what every rank has whole is the same, and nothing else."""
    case = CASES[0]
    model = checkpoint(case)
    found = differences(vllm.held(model, case, Rank(0, 2)), loaded(model, case, Rank(1, 2)))
    assert {difference.what for difference in found} == {"sha256"}
    cut = ("embed_tokens", "lm_head", "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert {difference.name.split(".")[-2] for difference in found} == set(cut)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "tp_size"),
    [(LLAMA, 3), (SIX_HEADS, 2), ({**LLAMA, "intermediate_size": 388}, 8), ({**SIX_HEADS, "vocab_size": 512}, 3)],
    ids=["heads", "kv-heads", "intermediate", "vocabulary"],
)
def test_sizes_that_the_engine_cannot_share_are_refused_here_too(vllm, tmp_path, config, tp_size):
    case = Case("refused", config)
    model = checkpoints.write(case, tmp_path / "model")
    with pytest.raises(EngineError):
        vllm.held(model, case, Rank(0, tp_size))
    with pytest.raises(WeightCacheError):
        loaded(model, case, Rank(0, tp_size))


@pytest.mark.timeout(300)
def test_what_the_engine_refuses_is_an_error_and_not_a_comparison(vllm, tmp_path):
    with pytest.raises(EngineError):
        vllm.held(tmp_path, CASES[0], Rank(0, 1))
