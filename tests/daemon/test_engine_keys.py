"""The receipt of what an engine's key is computed from: whatever may change the key changes it, a new life does not."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.daemon.engine_keys import ask_for_key, inputs_of
from weightcached.daemon.options import ServeOptions, parse_serve
from weightcached.protocol.errors import EngineFailed


def options_of(*arguments: str, rank: int = 0) -> ServeOptions:
    where = ["--runtime-dir", "/run/weightcached", "--tp-size", "2", "--tp-rank", str(rank)]
    return parse_serve(["--model", "/m", *where, "--engine", "toy", "--", *arguments])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_it_is_the_same_in_another_life_of_the_keeper(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = inputs_of(options_of("--a"), model_dir)
    for name in ("LISTEN_PID", "LISTEN_FDS", "NOTIFY_SOCKET", "WATCHDOG_USEC", "INVOCATION_ID"):
        monkeypatch.setenv(name, "another")
    assert inputs_of(options_of("--a"), model_dir) == before
    assert before is not None
    assert len(before) == 64


@pytest.mark.parametrize(
    "change",
    [
        lambda directory, patch: patch.setenv("TOY_ENGINE_REVERSED", "1"),
        lambda directory, patch: os.utime(directory / "config.json", ns=(1, 1)),
        lambda directory, patch: (directory / "hf_quant_config.json").write_text("{}"),
        lambda directory, patch: patch.syspath_prepend(directory),
        lambda directory, patch: patch.setattr(sys, "version", "4.0"),
    ],
    ids=["a variable", "a file's stat", "a file", "where packages are", "the interpreter"],
)
def test_what_may_change_a_key_changes_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., object]
) -> None:
    before = inputs_of(options_of(), model_dir)
    change(model_dir, monkeypatch)
    assert inputs_of(options_of(), model_dir) != before


def test_an_installation_changes_it(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    before = inputs_of(options_of(), model_dir)
    (site / "toy_engine-2.0.dist-info").mkdir()
    assert inputs_of(options_of(), model_dir) != before


def test_other_options_have_another(model_dir: Path) -> None:
    found = {inputs_of(options, model_dir) for options in (options_of(), options_of("--a"), options_of(rank=1))}
    assert len(found) == 3


def test_a_directory_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert inputs_of(options_of(), tmp_path / "gone") is None


ENDS = """
import os
class Adapter:
    name, revision = "toy", 1
    def key(self, request):
        {ends}
    def build(self, request, progress):
        raise NotImplementedError
ADAPTER = Adapter()
"""


@pytest.mark.parametrize(("ends", "found"), [("os._exit(3)", "exit status 3"), ("raise KeyboardInterrupt", "SIGINT")])
def test_an_engine_that_ends_the_process_of_its_key_has_failed_and_is_named(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, found: str
) -> None:
    site = tmp_path / "site"
    about = site / "ends-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "ends.py").write_text(ENDS.format(ends=ends))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ends\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[weightcached.engines]\ntoy = ends:ADAPTER\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(EngineFailed, match="toy") as failed:
        asyncio.run(ask_for_key("toy", options_of(), model_dir))
    assert found in str(failed.value.found)
