"""Numbers on every command line: what is no time, no number of ranks or no directory is told at once, as a bad option.

A ``--timeout nan`` that is taken waits for ever, and a ``release`` that looked at no place would report success.
"""

from importlib import import_module
from pathlib import Path

import pytest

from weightcached.daemon.cli import COMMANDS
from weightcached.daemon.generation import Origin
from weightcached.protocol.command_line import USAGE_EXIT
from weightcached.protocol.errors import InvalidOption

NO_SECONDS = ["nan", "-1", "inf", "1e300", "soon"]
NO_COUNTS = ["0", "-1", "1.5", "nan", "9" * 30]


def run(command: str, *arguments: str) -> int:
    """In this process: nothing is to be started."""
    module, _, function = COMMANDS[command][0].partition(":")
    try:
        status: int = getattr(import_module(module), function)(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    return status


@pytest.mark.parametrize("seconds", NO_SECONDS)
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("wait", "--timeout"),
        ("status", "--timeout"),
        ("release", "--timeout"),
        ("exporter", "--timeout"),
        ("serve", "--drain-timeout"),
        ("serve", "--exchange-timeout"),
        ("engine", "--timeout"),
        ("engine", "--wait-for-daemon"),
        ("supervise", "--watchdog"),
        ("verify", "--timeout"),
        ("snapshot", "--timeout"),
    ],
)
def test_no_seconds(command: str, option: str, seconds: str, runtime_dir: Path) -> None:
    more = {"verify": ["m"], "snapshot": ["save", "m", "to"]}.get(command, [])
    words = [*more, "--runtime-dir", str(runtime_dir), f"{option}={seconds}"]
    assert run(command, *words) == USAGE_EXIT


@pytest.mark.parametrize("command", ["wait", "release", "serve", "up"])
@pytest.mark.parametrize("count", [*NO_COUNTS, "1000000"])
def test_no_number_of_ranks(command: str, count: str, runtime_dir: Path) -> None:
    more = {"wait": ["--timeout", "1"], "release": []}.get(command, ["--model", "m", "--layout", "fused"])
    rank = [] if command == "up" else ["--tp-rank", "0"]
    words = ["--runtime-dir", str(runtime_dir), "--tp-size", count, *rank, *more]
    assert run(command, *words) == USAGE_EXIT


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_variable_that_is_not_set_is_not_the_current_directory(command: str, runtime_dir: Path) -> None:
    """``--model "$MODEL"``; where a checkpoint lies in the current directory, that would be served."""
    assert run(command, "--runtime-dir", str(runtime_dir), "--model", "") == USAGE_EXIT


def test_a_path_that_is_no_text_is_refused_as_such() -> None:
    """Linux has names that are no UTF-8; neither the worker nor the state record could be told one."""
    with pytest.raises(InvalidOption, match="not UTF-8"):
        Origin.of("/models/llama-\udcff")


@pytest.mark.parametrize(("command", "more"), [("status", ()), ("release", ()), ("wait", ("--timeout", "60"))])
def test_a_runtime_directory_that_is_a_file_is_not_an_empty_one(
    command: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run(command, "--runtime-dir", str(file), *more) in (1, 2)
