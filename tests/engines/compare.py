"""Our side, and the comparison of both."""

from __future__ import annotations

from pathlib import Path

from tests.engines.cases import Case, Rank
from tests.engines.held import Held, held_by
from tests.support import daemons
from weightcached.client import attach


def loaded(model: Path, case: Case, rank: Rank) -> dict[str, Held]:
    """What our loader makes, in this process: with ``off`` no daemon is asked."""
    with attach(model, mode="off", **case.options_at(rank)) as weights:
        return held_by(weights)


def served(model: Path, case: Case, rank: Rank, runtime_dir: Path) -> dict[str, Held]:
    """What an engine has from a daemon that has loaded it: with ``require`` nothing is ever loaded here."""
    options = case.options_at(rank)
    with daemons.daemon(model, runtime_dir, **options) as daemon:
        daemon.wait_until("ready")
        with attach(model, mode="require", runtime_dir=runtime_dir, **options) as weights:
            assert weights.source == "daemon"
            return held_by(weights)
