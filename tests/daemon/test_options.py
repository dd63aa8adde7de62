"""Options of `serve`: valid ones become a place and values, others are refused by name before anything starts."""

import grp
import pwd
from pathlib import Path

import pytest

from weightcached.daemon.options import parse_serve
from weightcached.protocol.command_line import USAGE_EXIT
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import InvalidOption, InvalidPlace
from weightcached.protocol.peers import AllowList

MODEL = ["--model", "/somewhere", "--runtime-dir", "/run/w"]


def test_defaults() -> None:
    options = parse_serve(MODEL)
    assert (options.parallel, options.layout) == (Parallel(tp_size=1, tp_rank=0), "hf")
    assert (options.dtype, options.quantization) == ("auto", "none")
    assert options.place.socket_path == Path("/run/w/default/host-tp0of1.sock")
    assert options.allowed == AllowList(frozenset(), frozenset())


def test_everything() -> None:
    words = "--tp-size 4 --tp-rank 3 --layout fused --dtype float16 --quantization int4=64 --name blue --allow-uid 7"
    words += " --allow-uid 8 --allow-gid 9 --trust-filesystem fuse --drain-timeout 1.5 --exchange-timeout 2"
    options = parse_serve([*MODEL, *words.split(), "--cache-dir", "/c", "--log-format", "json"])
    assert options.place.socket_path == Path("/run/w/blue/host-tp3of4.sock")
    assert options.allowed == AllowList(frozenset({7, 8}), frozenset({9}))
    assert (options.quantization, options.trusted_filesystems) == ("int4=64", ("fuse",))
    assert (options.drain_timeout_s, options.exchange_timeout_s, options.cache_dir) == (1.5, 2.0, Path("/c"))


def test_users_and_groups_may_be_named() -> None:
    user, group = pwd.getpwall()[-1], grp.getgrall()[-1]
    options = parse_serve([*MODEL, "--allow-uid", user.pw_name, "--allow-gid", group.gr_name])
    assert options.allowed == AllowList(frozenset({user.pw_uid}), frozenset({group.gr_gid}))


def test_a_rank_is_never_guessed() -> None:
    with pytest.raises(InvalidOption, match="--tp-rank is required"):
        parse_serve([*MODEL, "--tp-size", "2"])


@pytest.mark.parametrize("kind", ["pp", "ep"])
def test_nor_is_a_stage_or_an_expert_rank(kind: str) -> None:
    with pytest.raises(InvalidOption, match=f"--{kind}-rank is required"):
        parse_serve([*MODEL, f"--{kind}-size", "2"])


def test_ranks_of_every_kind_are_part_of_the_place() -> None:
    words = "--tp-size 2 --tp-rank 1 --pp-size 3 --pp-rank 2 --ep-size 4 --ep-rank 3 --expert-placement round_robin"
    options = parse_serve([*MODEL, *words.split()])
    assert options.place.socket_path == Path("/run/w/default/host-tp1of2-pp2of3-ep3of4.sock")
    assert options.parallel == Parallel(
        tp_size=2, tp_rank=1, pp_size=3, pp_rank=2, ep_size=4, ep_rank=3, expert_placement="round_robin"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tp-size", "2", "--tp-rank", "2"], InvalidOption),
        (["--pp-size", "2", "--pp-rank", "2"], InvalidOption),
        (["--ep-size", "2", "--ep-rank", "-1"], InvalidOption),
        (["--tp-size", "2", "--tp-rank", "0", "--ep-size", "3", "--ep-rank", "0"], InvalidOption),
        (["--tp-size", "2", "--tp-rank", "0", "--ep-size", "4", "--ep-rank", "3"], InvalidOption),
        (["--tp-rank", "-1"], InvalidOption),
        (["--name", "x" * 200], InvalidPlace),
        (["--runtime-dir", "relative"], InvalidOption),
        (["--trust-filesystem", "nonsense"], InvalidOption),
    ],
)
def test_values_that_cannot_be_used(arguments: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_serve([*MODEL, *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [*MODEL, "--name", "../up"],
        [*MODEL, "--layout", "round"],
        [*MODEL, "--quantization", "int4=100"],
        [*MODEL, "--tp-size", "0"],
        [*MODEL, "--drain-timeout", "-1"],
        [*MODEL, "--drain-timeout", "nan"],
        [*MODEL, "--allow-uid", "-5"],
        [*MODEL, "--allow-uid", "nobody-of-that-name"],
        [*MODEL, "--allow-gid", ""],
        [*MODEL, "--tp", "2"],  # abbreviations are not guessed
    ],
)
def test_bad_usage_exits_with_its_own_code(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_serve(arguments)
    assert exited.value.code == USAGE_EXIT
    assert "weightcached serve:" in capsys.readouterr().err


def test_the_variable_of_the_runtime_directory_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", "/elsewhere")
    assert parse_serve(["--model", "m"]).place.runtime_dir == Path("/elsewhere")
    assert parse_serve(MODEL).place.runtime_dir == Path("/run/w")
