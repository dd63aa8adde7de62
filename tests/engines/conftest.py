"""One engine for the whole session, and each case's checkpoint once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import checkpoints, engine
from tests.engines.cases import Case
from tests.support.unprivileged import ROOT
from weightcached.client.counters import fallbacks

GENERATING = {"PYTHONPATH": str(ROOT)}
"""Workers find the class that looks into them there."""


def pytest_configure() -> None:
    """Whoever asks for these tests gets them or an error: a skip would look like a comparison that found nothing."""
    if not engine.PYTHON.exists():
        raise pytest.UsageError(f"there is no {engine.PYTHON}: run `make test-engines`, which makes it")


@pytest.fixture(scope="session")
def vllm() -> Iterator[engine.Engine]:
    """vLLM's loader. Nothing in the session may have fallen back to disk."""
    before = fallbacks()
    with engine.running() as running:
        yield running
    assert fallbacks() == before


@pytest.fixture(scope="session")
def generator() -> Iterator[engine.Engine]:
    """vLLM as an engine of one rank at a time."""
    with engine.running(engine.WHOLE, GENERATING) as running:
        yield running


@pytest.fixture(scope="session")
def pair() -> Iterator[engine.Engine]:
    """vLLM as an engine of two ranks, a processor for each."""
    with engine.running(engine.WHOLE, {**GENERATING, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}) as running:
        yield running


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """The checkpoint of a case, made when it is first asked for."""
    made: dict[str, Path] = {}

    def of(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = checkpoints.write(case, tmp_path_factory.mktemp("engines") / case.name)
        return made[case.name]

    return of
