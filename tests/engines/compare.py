"""Our side, and the comparison of both."""

from __future__ import annotations

from pathlib import Path

from tests.engines.cases import Case, Rank
from tests.engines.held import Held, held_by
from tests.support import daemons
from weightcached.client import attach
from weightcached.client.verify import Finding, against_disk
from weightcached.protocol.config import build_config


def loaded(model: Path, case: Case, rank: Rank) -> dict[str, Held]:
    """What our loader makes, in this process: with ``off`` no daemon is asked."""
    with attach(model, mode="off", **case.options_at(rank)) as weights:
        return held_by(weights)


def unlike_the_reference(model: Path, case: Case, rank: Rank) -> list[Finding]:
    """In what our loader and the naive reference, which share no code, do not agree."""
    options = case.options_at(rank)
    with attach(model, mode="off", **options) as weights:
        findings = against_disk(weights, model, build_config(model, **options))
    return [finding for finding in findings if finding.verdict != "equal"]


def served(model: Path, case: Case, rank: Rank, runtime_dir: Path) -> dict[str, Held]:
    """What an engine has from a daemon that has loaded it: with ``require`` nothing is ever loaded here."""
    options = case.options_at(rank)
    with daemons.daemon(model, runtime_dir, **options) as daemon:
        daemon.wait_until("ready")
        with attach(model, mode="require", runtime_dir=runtime_dir, **options) as weights:
            assert weights.source == "daemon"
            return held_by(weights)
