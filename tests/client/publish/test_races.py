"""A trainer and another coordinator at once, over two real ranks: whatever each is told has come about, and no more."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.client.publish.test_publish import trained, where
from tests.support.commanding import other_weights
from tests.support.daemons import Daemon
from tests.support.racing import race
from weightcached.client.control import rollback, update
from weightcached.client.publish import publish


@pytest.mark.parametrize("force", [False, True], ids=["plain", "forced"])
def test_a_trainer_and_another_coordinator_at_once(
    ranks: list[Daemon], model: Path, tmp_path: Path, force: bool
) -> None:
    """Who pushes too, updates or rolls back, and with ``force`` ends the push if there is one."""
    chance, at = random.Random(11), ranks[0].place.runtime_dir

    def pushing(step: float, **options: Any) -> str:
        return publish(trained(model, step), **where(ranks), **options)

    def updating(number: int) -> str:
        return update(other_weights(model, tmp_path / str(number), number=number), runtime_dir=at, force=force).version

    def rolling_back() -> str:
        return rollback(runtime_dir=at, force=force).version

    began_s = time.monotonic()
    pushing(20.0)
    takes_s = time.monotonic() - began_s
    others: list[Callable[[], str]] = [
        partial(updating, 2),
        partial(pushing, 21.0, force=force),
        rolling_back,
        partial(updating, 3),
    ]
    for number, other in enumerate(others):
        delays_s = chance.sample([0.0, chance.uniform(0, takes_s)], 2)
        ends = race(ranks, [partial(pushing, 30.0 + number), other], delays_s, may_end_others=force)
        assert any(isinstance(one, str) for one in ends), "one of two at the least"
