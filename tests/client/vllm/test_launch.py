"""`weightcached launch`: what it adds to a command of vLLM, what it refuses, and that it becomes the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightcached.client.vllm.launch import main, require_distribution, with_cache
from weightcached.protocol.command_line import USAGE_EXIT
from weightcached.protocol.errors import InvalidOption

SERVE = ["vllm", "serve", "some/model", "--port", "8001"]
MODULE = ["/opt/python3.11", "-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"]


@pytest.mark.parametrize("command", [SERVE, ["/usr/local/bin/vllm", *SERVE[1:]], ["/usr/bin/python3", *MODULE[1:]]])
def test_the_load_format_and_the_options_stand_after_the_command(command: list[str]) -> None:
    filled = with_cache(command, {"weight_cache_mode": "require", "name": "mine"})
    assert filled[: len(command)] == command
    added = dict(zip(filled[len(command) :: 2], filled[len(command) + 1 :: 2], strict=True))
    assert added["--load-format"] == "weightcached"
    assert json.loads(added["--model-loader-extra-config"]) == {"weight_cache_mode": "require", "name": "mine"}


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "bench", "serve"],
        ["vllm"],
        ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"],
        ["python3", "my_engine.py"],
        ["python3", "-m"],
        ["pythonic", "-m", "vllm.entrypoints.openai.api_server"],
        ["bash", "-c", "vllm serve m"],
        ["python3", "my_engine.py", *MODULE[1:]],
        ["python3", "-c", "import x", *MODULE[1:]],
        ["python3", "-m", "x", *MODULE[1:]],
        ["python3", "-"],
    ],
)
def test_another_command_is_refused_with_what_to_write(command: list[str]) -> None:
    with pytest.raises(InvalidOption) as caught:
        with_cache(command, {"weight_cache_mode": "client"})
    step = str(caught.value.next_step)
    assert '--load-format weightcached --model-loader-extra-config \'{"weight_cache_mode": "client"}\'' in step


@pytest.mark.parametrize(
    "words",
    [
        ["--load-format", "auto"],
        ["--load-format=dummy"],
        ["--load_format", "safetensors"],
        ["--load-format"],
        ["--load-form", "dummy"],
        ["--load_f=dummy"],
        ["--load", "dummy"],
    ],
)
def test_another_load_format_is_a_conflict(words: list[str]) -> None:
    with pytest.raises(InvalidOption, match="load format already"):
        with_cache([*SERVE, *words], {})


@pytest.mark.parametrize("words", [["--load-balance", "x"], ["--model", "x"], ["--load-formats", "x"], ["--l", "x"]])
def test_other_options_that_begin_alike_are_none_of_ours(words: list[str]) -> None:
    assert with_cache([*SERVE, *words], {})[: len(SERVE) + 2] == [*SERVE, *words]


@pytest.mark.parametrize(
    "options", [["-u"], ["-X", "importtime"], ["-Wignore"], ["-sE", "-W", "error", "--check-hash-based-pycs", "never"]]
)
def test_an_interpreter_s_own_options_may_stand_before_the_module(options: list[str]) -> None:
    command = ["python3", *options, *MODULE[1:]]
    assert with_cache(command, {})[: len(command)] == command


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("load-format: dummy\n", "load format already"),
        ("load_format: dummy\n", "load format already"),
        ("model-loader-extra-config:\n  name: x\n", "options for the loader already"),
    ],
)
@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_a_file_of_options_says_as_much_as_the_command(tmp_path: Path, text: str, said: str, form: list[str]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(InvalidOption, match=said):
        with_cache([*SERVE, *(word.format(file) for word in form)], {})


@pytest.mark.parametrize("text", [None, "a: [", "- a\n", "\udcff"])
def test_a_file_of_options_that_cannot_be_read_is_warned_of_and_left_to_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "--load-format" in with_cache([*SERVE, "--config", str(file)], {})
    assert f"{file}: not looked at" in capsys.readouterr().err


def test_without_a_yaml_parser_a_file_of_options_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with_cache([*SERVE, "--config", str(tmp_path / "options.yaml")], {})
    assert "not looked at" in capsys.readouterr().err


def test_our_own_load_format_is_none_and_is_not_said_twice() -> None:
    assert with_cache([*SERVE, "--load-format", "weightcached"], {}).count("--load-format") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--model-loader-extra-config", "{}"],
        ["--model_loader_extra_config={}"],
        ["--model-loader-extra-config.name=x"],
        ["--model-loader-extra", "{}"],
        ["--model_l.name=x"],
    ],
)
def test_options_of_the_loader_come_from_one_side(words: list[str]) -> None:
    with pytest.raises(InvalidOption, match="options for the loader already"):
        with_cache([*SERVE, *words], {})


def test_options_that_the_loader_would_refuse_are_refused_before_it_starts() -> None:
    with pytest.raises(InvalidOption, match="quantization"):
        with_cache(SERVE, {"quantization": "fp7"})


@pytest.mark.parametrize("words", [[], ["--weight-cache-mode", "client"], ["--"], ["--", "true"]])
def test_without_an_engine_it_ends_with_the_status_of_bad_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == USAGE_EXIT
    assert "vllm serve MODEL" in capsys.readouterr().err


def test_a_command_without_the_two_dashes_is_told_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "n", "vllm", "serve", "m", "--dtype", "half"]) == USAGE_EXIT
    said = capsys.readouterr().err
    assert "the engine's command stands after `--`; expected: weightcached launch [options] -- vllm serve …" in said
    assert "next step: weightcached launch --name n -- vllm serve m --dtype half" in said


def test_the_command_of_a_build_for_cpus_is_refused_with_the_form_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    require_distribution(["vllm", "serve", "m"])  # another environment's: not ours to judge
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InvalidOption) as caught:
        require_distribution(["vllm", "serve", "m", "--port", "1"])
    working = "python -m vllm.entrypoints.openai.api_server --model m --port 1"
    assert str(caught.value.next_step).endswith(working)
    require_distribution(working.split())
    metadata = tmp_path / "vllm-1.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    require_distribution(["vllm", "serve", "m", "--port", "1"])


def test_a_program_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "/no/such/folder/vllm", "serve", "m"]) == 127
    assert "/no/such/folder/vllm: No such file" in capsys.readouterr().err


def test_it_becomes_the_engine_with_every_option_that_was_stated(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\nsys.exit(7)\n"
    )
    vllm.chmod(0o755)
    options = ["--weight-cache-mode", "require", "--name", "n", "--runtime-dir", "/r", "--timeout", "5"]
    options += ["--wait-for-daemon", "2", "--dtype", "bfloat16", "--on-stale", "exit", "--allow-uid", "12"]
    options += ["--allow-uid", "13", "--draft-name", "d", "--want", "current", "--quantization", "int8"]
    command = [sys.executable, "-m", "weightcached.daemon", "launch", *options, "--", "vllm", "serve", "m", "--", "x"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as run:
        said, _ = run.communicate(timeout=60)
    pid, words = json.loads(said)
    assert (run.returncode, pid) == (7, run.pid)
    assert words[:5] == ["serve", "m", "--load-format", "weightcached", "--model-loader-extra-config"]
    assert words[6:] == ["--", "x"]
    assert json.loads(words[5]) == {
        "weight_cache_mode": "require",
        "name": "n",
        "runtime_dir": "/r",
        "draft_name": "d",
        "dtype": "bfloat16",
        "quantization": "int8",
        "want": "current",
        "timeout_s": 5.0,
        "wait_for_daemon_s": 2.0,
        "on_stale": "exit",
        "allow_uids": [12, 13],
    }
