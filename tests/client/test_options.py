"""What an attach may be told: whatever passes can be said to a daemon, and be waited for."""

import os
import select
import sys

import pytest

from weightcached.client.options import checked_seconds, engine_name


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
