"""An engine that ends says so, with what it logged; one that its libraries kill at the start gets a second try.

A script stands in for vLLM here.
"""

from __future__ import annotations

import pytest

from tests.engines import engine
from tests.engines.cases import CASES, Rank


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Call it with the lines of a shell script that is then started as the engine. Returns a file it may write to."""

    def becomes(*lines: str):
        script = tmp_path / "engine"
        script.write_text("\n".join(["#!/bin/sh", f"starts={tmp_path}/starts; echo >>$starts", *lines, ""]))
        script.chmod(0o755)
        monkeypatch.setattr(engine, "PYTHON", script)
        return tmp_path / "starts"

    return becomes


def test_an_engine_that_ends_is_an_error_with_its_status_and_its_last_words(program, tmp_path):
    program("echo ready", "read request", "echo out of luck >&2", "exit 3")
    with engine.running() as running:
        for _ in range(2):  # and it stays one
            with pytest.raises(engine.EngineError, match=r"(?s)ended with 3.*out of luck"):
                running.held(tmp_path, CASES[0], Rank(0, 1))


def test_an_illegal_instruction_at_the_start_is_tried_once_more(program, tmp_path):
    starts = program(
        "[ $(wc -l <$starts) -gt 1 ] || kill -ILL $$", "echo ready", "read request", 'echo \'{"error": "no"}\''
    )
    with engine.running() as running, pytest.raises(engine.EngineError, match="no"):
        running.held(tmp_path, CASES[0], Rank(0, 1))
    assert len(starts.read_text()) == 2


@pytest.mark.parametrize(("end", "tries"), [("kill -ILL $$", 2), ("exit 1", 1)])
def test_an_engine_that_does_not_start_is_not_tried_for_ever(program, tmp_path, end, tries):
    starts = program(end)
    with engine.running() as running, pytest.raises(engine.EngineError, match="ended with"):
        running.held(tmp_path, CASES[0], Rank(0, 1))
    assert len(starts.read_text()) == tries
