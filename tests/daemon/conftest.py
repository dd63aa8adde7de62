"""What the daemon's tests share: a checkpoint whose receipts prove something, a runtime directory with a short path,
and the engine of tests/example_engine with its checkpoint.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import settled, tiny_llama
from tests.support.example_engine import install, toy_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that has been lying there for two seconds, so that equal receipts prove equal content."""
    return settled(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some pages of the device: none of its parameters fills one, and all together take several."""
    return tiny_llama(tmp_path_factory.mktemp("large"), hidden_size=256, vocab_size=2048, intermediate_size=1024)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory for sockets, not made yet. (pytest's own paths are too long for a socket.)"""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        yield Path(name) / "run"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed") / "site")


@pytest.fixture
def site(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is installed, for this process and all that it starts."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    return installed


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy"))
