"""A running vLLM takes another generation and goes back: its tokens are those of whichever it has, at one address."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.engines.cases.dense import CASES as DENSE
from tests.engines.cases.experts import CASES as EXPERTS
from tests.engines.engine import EngineError
from tests.engines.generating import ended, of_vllm, said, said_by, started, with_cache
from tests.support.fine_tuned import fine_tuned, generation_of
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import AnswerSwitches, LyingDaemon, Receive, Step

CASES = {case.name: case for case in (*DENSE, *EXPERTS)}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def two(tmp_path):
    """``two(model)``: a checkpoint tuned from it, and a daemon that has both and serves the first."""
    with ExitStack() as stack:

        def serve(model):
            tuned = fine_tuned(model, tmp_path / "tuned")
            first = stack.enter_context(generation_of(model, tmp_path / "a", layout="fused"))
            second = stack.enter_context(generation_of(tuned, tmp_path / "b", layout="fused"))
            place = Place(tmp_path / "run", "default", host_device(tp_size=1, tp_rank=0))
            place.directory.mkdir(mode=0o755, parents=True)
            script: list[Step] = [Receive(), first.step(), AnswerSwitches([first, second], current=second)]
            stack.enter_context(LyingDaemon(place.socket_path, script, timeout_s=300))
            return tuned, first, second

        yield serve


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_are_those_of_the_generation_that_was_switched_to(generator, checkpoint, tmp_path, two, name):
    model = checkpoint(CASES[name])
    tuned, first, second = two(model)
    expected = [said_by(generator, of_vllm(path))[1] for path in (model, tuned)]
    assert expected[0] != expected[1]
    options = {"want": "current", "heartbeat_s": 60}
    (before,) = started(generator, with_cache(model, tmp_path / "run", options=options))
    assert said(generator) == expected[0]
    for generation, tokens in ((second, expected[1]), (first, expected[0]), (second, expected[1])):
        (rank,) = generator.ask(do="switch", version=generation.message.version)["ranks"]
        assert (rank["to_version"], rank["changed"]) == (generation.message.version, [])
        assert said(generator) == tokens
    (after,) = generator.ask(do="look")["workers"]
    ended(generator)
    assert after["mapped_nbytes"] == before["mapped_nbytes"] > 0
    assert (after["elsewhere"], after["private_nbytes"]) == ([], 0)


def test_what_vllm_has_made_of_the_weights_is_not_left_behind_but_refused(generator, checkpoint, tmp_path, two):
    model = checkpoint(CASES["mixtral"])
    two(model)
    options = {"want": "current", "heartbeat_s": 60}
    started(generator, with_cache(model, tmp_path / "run", options=options))
    with pytest.raises(EngineError, match=r"experts.*w13_weight") as caught:
        generator.ask(do="switch")
    assert caught.value.code == "swap_refused"
