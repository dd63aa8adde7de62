"""A running vLLM takes another generation and goes back: its tokens are those of whichever it has, at one address."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases.dense import CASES as DENSE
from tests.engines.cases.experts import CASES as EXPERTS
from tests.engines.engine import Engine, EngineError
from tests.engines.generating import PAIR, PROMPTS, TOKENS, ended, of_vllm, said, said_by, serving, started, with_cache
from tests.support.eventually import eventually
from tests.support.fine_tuned import fine_tuned
from weightcached.client.control import update

CASES = {case.name: case for case in (*DENSE, *EXPERTS)}
pytestmark = pytest.mark.timeout(600)  # three engines a test, beside daemons
OPTIONS = {"want": "current"}


IN_BLOCKS: Mapping[str, Any] = {"block_size": 32, "max_model_len": 128}
LONG = [[*range(10, 90)], [3] * 70]
"""Two whole blocks each, and more: what vLLM's prefix cache keeps."""


def said_anew(engine: Engine) -> list[list[int]]:
    """What it says, all of it computed: nothing is in the prefix cache. Afterwards the long prompts are."""
    answer = engine.ask(do="say", prompts=[*PROMPTS, *LONG], max_tokens=TOKENS)
    assert answer["cached"] == [0] * len(answer["cached"])
    tokens: list[list[int]] = answer["tokens"]
    return tokens


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_are_those_of_the_generation_that_was_switched_to(generator, checkpoint, tmp_path, name):
    """Also of prompts whose beginning was in the prefix cache, computed with the weights before."""
    model = checkpoint(CASES[name])
    tuned = fine_tuned(model, tmp_path / "tuned")
    expected = []
    for path in (model, tuned):
        started(generator, of_vllm(path, **IN_BLOCKS))
        expected.append(said_anew(generator))
        ended(generator)
    assert all(one != other for one, other in zip(*expected, strict=True))
    with serving(model, tmp_path / "run") as _:
        (before,) = started(generator, with_cache(model, tmp_path / "run", options=OPTIONS, **IN_BLOCKS))
        assert said_anew(generator) == expected[0]
        update(tuned, runtime_dir=tmp_path / "run")
        until = generator.ask(do="say", prompts=LONG, max_tokens=TOKENS)
        assert (until["tokens"], until["cached"]) == (expected[0][-len(LONG) :], [64, 64])
        forward = generator.ask(do="switch")
        assert forward["published"] is not None
        assert forward["ranks"][0]["changed"] == []
        assert said_anew(generator) == expected[1]
        back = generator.ask(do="switch", version=forward["ranks"][0]["from_version"])
        assert back["published"] is None
        assert said_anew(generator) == expected[0]
        (after,) = generator.ask(do="look")["workers"]
        ended(generator)
    assert after["mapped_nbytes"] == before["mapped_nbytes"] > 0
    assert (after["elsewhere"], after["private_nbytes"]) == ([], 0)


def test_what_vllm_has_made_of_the_weights_is_not_left_behind_but_refused(generator, checkpoint, tmp_path):
    model = checkpoint(CASES["mixtral"])
    with serving(model, tmp_path / "run"):
        started(generator, with_cache(model, tmp_path / "run", options=OPTIONS))
        with pytest.raises(EngineError, match=r"experts.*w13_weight") as caught:
            generator.ask(do="switch")
    assert caught.value.code == "swap_refused"


def test_two_ranks_switch_together_or_not_at_all_or_end(pair, checkpoint, tmp_path):
    model = checkpoint(CASES["llama"])
    tuned = fine_tuned(model, tmp_path / "tuned")
    _, of_tuned = said_by(pair, of_vllm(tuned, **PAIR))
    with serving(model, tmp_path / "run", tp_size=2) as daemons:
        workers = started(pair, with_cache(model, tmp_path / "run", options=OPTIONS, **PAIR))
        before = said(pair)
        update(tuned, runtime_dir=tmp_path / "run")
        forward = pair.ask(do="switch")
        assert len(forward["ranks"]) == 2
        assert forward["published"] is not None
        assert len({rank["generation"] for rank in forward["ranks"]}) == 2
        assert said(pair) == of_tuned != before
        pair.ask(do="switch", version=forward["ranks"][0]["from_version"])
        assert said(pair) == before

        # One rank refuses, because it has written to its weights before: the other takes back what it had.
        pair.ask(do="rpc", method="write_on", args=[1])
        written = said(pair)
        stage(pair)
        back, refused = pair.ask(do="rpc", method="weightcached_swap", args=["refuse"])["ranks"]
        assert (back["code"], refused["code"]) == ("ranks_disagree", "swap_refused")
        assert "tp1of2: " in back["error"]
        assert said(pair) == written

        # What the other had nobody gives it any more: no rank goes on.
        stage(pair)
        daemons[0].stop(signal.SIGKILL)
        with pytest.raises(EngineError):
            pair.ask(do="rpc", method="weightcached_swap", args=["refuse"])
        eventually(lambda: not any(Path(f"/proc/{worker['pid']}").exists() for worker in workers))
        assert pair.log().count("this worker ends with status 75") == 2


def stage(engine: Engine) -> None:
    """Have all ranks prepare what is granted now."""
    engine.ask(do="rpc", method="weightcached_stage", args=[None, 60.0])
    eventually(lambda: None not in engine.ask(do="rpc", method="weightcached_standing")["ranks"])
