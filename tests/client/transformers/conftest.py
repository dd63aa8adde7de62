"""Fixtures for the tests of Transformers over the weight cache: checkpoints of all architectures, daemons on them.

Transformers keeps threads, descriptors and memory once it has been imported, so what is left behind is not counted.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import CASES, Case
from tests.engines.checkpoints import write
from tests.support.daemons import daemon

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """Replaces the check that the other tests of the client have."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, Path]]:
    """``checkpoints(name)``: the case of that name, and its checkpoint. Made once, and never written to."""
    made: dict[str, Path] = {}

    def make(name: str) -> tuple[Case, Path]:
        if name not in made:
            made[name] = write(BY_NAME[name], tmp_path_factory.mktemp("model") / name)
        return BY_NAME[name], made[name]

    return make


@pytest.fixture
def cache(runtime_dir: Path) -> dict[str, Any]:
    """Options of the weight cache: a daemon at this test's runtime directory, or an error."""
    return {
        "mode": "require",
        "runtime_dir": runtime_dir,
        "cache_dir": runtime_dir / "digests",
        "wait_for_daemon_s": 60.0,
    }


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Callable[..., None]]:
    """``serve(directory, *arguments, **options)``: a real daemon at this test's place, ended with the test."""
    with ExitStack() as running:

        def start(directory: Path, *arguments: str, **options: Any) -> None:
            running.enter_context(daemon(directory, runtime_dir, *arguments, **options))

        yield start
