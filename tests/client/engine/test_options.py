import pwd

import pytest

from weightcached.client.engine.command import exit_code
from weightcached.client.engine.options import DEFAULT_PORT, EngineOptions, parse, serve_command
from weightcached.protocol import errors
from weightcached.protocol.command_line import USAGE_EXIT


def test_it_serves_unless_there_is_a_prompt() -> None:
    assert parse(["--model", "m"]).port == DEFAULT_PORT
    assert parse(["--model", "m", "--prompt", "x"]).port is None
    assert parse(["--model", "m", "--prompt", "x", "--port", "0"]).port == 0


def test_the_default_mode_is_client() -> None:
    assert parse(["--model", "m"]).mode == "client"


def test_daemons_of_other_users_may_be_trusted_by_name_or_number() -> None:
    user = pwd.getpwall()[-1]
    assert parse(["--model", "m"]).allow_uids == []
    assert parse(["--model", "m", "--allow-uid", user.pw_name, "--allow-uid", "7"]).allow_uids == [user.pw_uid, 7]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", "m", "--weight-cache-mode", "on"],
        ["--model", "m", "--port", "65536"],
        ["--model", "m", "--port", "-1"],
        ["--model", "m", "--max-new-tokens", "0"],
        ["--model", "m", "--max-new-tokens", "many"],
        ["--model", "m", "--timeout", "-1"],
        ["--model", "m", "--timeout", "inf"],
        ["--model", "m", "--dtype", "int8"],
        ["--model", "m", "--layout", "fused"],
        ["--model", "m", "--mod", "n"],
        ["--model", "m", "--allow-uid", "nobody-of-that-name"],
    ],
)
def test_bad_words_end_with_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == USAGE_EXIT
    assert "usage: weightcached engine" in capsys.readouterr().err


def test_the_owned_daemon_serves_what_the_engine_asks_for() -> None:
    options = EngineOptions(model="m", dtype="float16", name="n", runtime_dir="/r")
    words = serve_command(options, "/models/m")
    asked = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "serve"
    assert asked == {
        "--model": "/models/m",
        "--layout": "hf",
        "--dtype": "float16",
        "--name": "n",
        "--runtime-dir": "/r",
    }


def test_the_owned_daemon_makes_the_layout_of_transformers_where_that_is_asked_for() -> None:
    words = serve_command(EngineOptions(model="m", layout="transformers"), "/models/m")
    assert words[words.index("--engine") + 1] == "transformers"
    assert "--layout" not in words


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidOption, 64),
        (errors.CheckpointMismatch, 2),
        (errors.UnsupportedModel, 2),
        (errors.DaemonAbsent, 3),
        (errors.DaemonFailed, 3),
        (errors.InsufficientMemory, 3),
        (errors.DaemonNotReady, 4),
        (errors.BindError, 5),
        (errors.ProtocolError, 5),
        (errors.MissingShard, 6),
    ],
)
def test_the_exit_code_tells_the_branch_of_the_error_tree(kind: type[errors.WeightCacheError], code: int) -> None:
    assert exit_code(kind("x")) == code


def test_every_error_has_an_exit_code() -> None:
    for kind in errors.ERRORS_BY_CODE.values():
        if kind is not errors.CacheConfigMismatch and kind is not errors.WeightCacheError:
            assert exit_code(kind("x")) in (2, 3, 4, 5, 6, 64)
    assert exit_code(errors.CacheConfigMismatch("x", fields=())) == 2
