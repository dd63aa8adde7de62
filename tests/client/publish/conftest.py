"""Two real ranks with the real loader, shared by the tests that leave them as they found them but for their weights."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon
from tests.support.groups import group


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        yield Path(name) / "run"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("publish") / "model",
        hidden_size=32,
        intermediate_size=48,
        vocab_size=66,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[list[Daemon]]:
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        group(model, Path(name) / "run", size=2, scripts={0: None, 1: None}) as ranks,
    ):
        yield ranks
