"""Two checkpoints of one configuration, and a runtime directory with a short path."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commanding import other_weights


@pytest.fixture
def other(settled_model: Path, tmp_path: Path) -> Path:
    return other_weights(settled_model, tmp_path / "other")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        yield Path(name) / "run"
