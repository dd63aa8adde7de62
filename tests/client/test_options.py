"""What an attach may be told: whatever passes can be said to a daemon, and be waited for."""

import os
import select
import sys
from typing import Any

import pytest

from weightcached.client import attach
from weightcached.client.options import checked_seconds, engine_name
from weightcached.protocol.errors import InvalidOption


def test_the_longest_wait_is_one_that_can_be_waited() -> None:
    """``poll`` counts milliseconds in 32 bits, and raises OverflowError for more."""
    with os.fdopen(os.memfd_create("always readable")) as file:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        assert poll.poll(checked_seconds("timeout_s", float("inf")) * 1000)


def test_a_program_whose_name_is_no_text_still_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux has names that are no UTF-8, and a Hello has none."""
    monkeypatch.setattr(sys, "argv", ["/srv/engine-\udcff.py"])
    assert engine_name(None) == r"engine-\udcff.py"


@pytest.mark.parametrize(
    "words",
    [
        {"allow_uids": ["root"]},
        {"allow_gids": [True]},
        {"runtime_dir": "/run/\0"},
        {"runtime_dir": "run"},
        {"runtime_dir": 3},
        {"name": 3},
        {"timeout_s": "3"},
        {"wait_for_daemon_s": None},
        {"heartbeat_s": "1"},
        {"digest": 3},
    ],
    ids=str,
)
def test_what_could_never_be_meant_is_refused_at_once(words: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        attach("/nonexistent", mode="require", tp_size=1, **words)
