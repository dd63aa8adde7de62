"""The page on adding an engine shows an adapter, its entry point and a client that work as they stand."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import TIMEOUT_S, daemon
from tests.support.example_engine import SIZES, toy_model
from tests.support.unprivileged import ROOT
from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import ENTRY_POINTS, EngineRequest, engine_key
from weightcached.protocol.errors import InvalidOption

PAGE = ROOT / "loader/engines/README.md"
BLOCK = re.compile(r"^<!-- example: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)
BLOCKS = {found["name"]: found["text"] for found in BLOCK.finditer(PAGE.read_text())}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's package is installed, for this process and all that it starts."""
    entry_points = tomllib.loads(BLOCKS["entry-point"])["project"]["entry-points"][ENTRY_POINTS]
    ((name, value),) = entry_points.items()
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {value}\n")
    (tmp_path / f"{value.partition(':')[0]}.py").write_text(BLOCKS["adapter"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wc-docs-", dir="/tmp") as name:
        yield Path(name) / "run"


def test_the_page_s_engine_is_served_to_the_page_s_client(site: Path, tmp_path: Path, runtime_dir: Path) -> None:
    model = toy_model(tmp_path / "model")
    with daemon(model, runtime_dir, "--engine", "mine", "--", "--transposed") as served:
        served.wait_until("ready")
        client = subprocess.run(
            [sys.executable, "-c", BLOCKS["client"], str(model)],
            env={**os.environ, "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert client.returncode == 0, client.stderr
    assert f"'up.weight': ({SIZES['hidden_size']}, {SIZES['intermediate_size']})" in client.stdout


def test_arguments_that_it_does_not_take_are_refused_by_it(site: Path, tmp_path: Path) -> None:
    request = EngineRequest(model_dir=tmp_path, parallel=Parallel(tp_size=1, tp_rank=0), arguments=("--packing", "4"))
    with pytest.raises(InvalidOption, match="mine takes --transposed"):
        engine_key("mine", request)
