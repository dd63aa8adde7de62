"""vLLM with two ranks, each with a daemon of its own: same tokens, and no token where they do not have the same."""

from __future__ import annotations

import pytest

from tests.engines.cases.dense import CASES as DENSE
from tests.engines.cases.experts import CASES as EXPERTS
from tests.engines.engine import EngineError
from tests.engines.generating import PAIR, ended, of_vllm, said_by, serving, started, with_cache

CASES = {case.name: case for case in (*DENSE, *EXPERTS)}
pytestmark = pytest.mark.timeout(600)  # an engine is three processes, each with seconds of imports


def test_each_rank_has_its_own_shard_and_they_say_what_they_say_with_vllm_s_loader(pair, checkpoint, tmp_path):
    model = checkpoint(CASES["llama"])
    _, expected = said_by(pair, of_vllm(model, **PAIR))
    with serving(model, tmp_path / "run", tp_size=2) as daemons:
        workers, tokens = said_by(pair, with_cache(model, tmp_path / "run", **PAIR))
        reports = [daemon.report() for daemon in daemons]
    assert tokens == expected
    assert [worker["report"]["generation"] for worker in workers] == [report.generation for report in reports]
    assert len({worker["report"]["version"] for worker in workers}) == 1
    assert [(worker["elsewhere"], worker["private_nbytes"]) for worker in workers] == [([], 0)] * 2


def test_ranks_of_which_one_has_no_daemon_stop_and_do_not_wait_for_each_other(pair, checkpoint, tmp_path):
    model = checkpoint(CASES["llama"])
    with serving(model, tmp_path / "run", tp_size=2, ranks=(1,)), pytest.raises(EngineError):
        started(pair, with_cache(model, tmp_path / "run", mode="client", **PAIR))
    log = pair.log()
    assert log.count("RanksDisagree: the ranks of this engine do not have the same weights") >= 2
    assert "tp0of2 disk" in log
    assert "tp1of2 daemon" in log


def test_ranks_of_which_one_is_refused_all_say_why(pair, checkpoint, tmp_path):
    model = checkpoint(CASES["llama"])
    with (
        serving(model, tmp_path / "run", tp_size=2, ranks=(0,)),
        serving(model, tmp_path / "run", tp_size=2, ranks=(1,), quantization="int8"),
        pytest.raises(EngineError),
    ):
        started(pair, with_cache(model, tmp_path / "run", mode="require", **PAIR))
    log = pair.log()
    assert "CacheConfigMismatch" in log
    assert "tp1of2 nothing" in log


def test_expert_ranks_have_the_experts_that_vllm_gives_them(pair, checkpoint, tmp_path):
    """Up to the first token and no further: vLLM 0.32 dies of it with expert-parallel ranks on a CPU, whoever loads."""
    model = checkpoint(CASES["qwen3-moe"])
    with serving(model, tmp_path / "run", tp_size=2, whole_experts=True):
        workers = started(pair, with_cache(model, tmp_path / "run", **PAIR, enable_expert_parallel=True))
        ended(pair)
    assert [worker["report"]["source"] for worker in workers] == ["daemon"] * 2
    assert ["host-tp0of2-ep0of2" in workers[0]["report"]["place"], "ep1of2" in workers[1]["report"]["place"]] == [
        True
    ] * 2
