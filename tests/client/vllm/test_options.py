"""The loader's options: what is taken, and that what is not is named."""

import pytest

from weightcached.client import attach
from weightcached.client.vllm.options import LoaderOptions, parse
from weightcached.protocol.errors import InvalidOption


def test_without_any_key_an_engine_is_a_client() -> None:
    assert parse({}) == LoaderOptions(weight_cache_mode="client")


def test_every_key_that_attach_has_too_has_its_default() -> None:
    defaults = attach.__kwdefaults__
    assert defaults is not None
    shared = {name: field.default for name, field in LoaderOptions.model_fields.items() if name in defaults}
    assert shared.keys() >= {"name", "runtime_dir", "want", "digest", "timeout_s", "wait_for_daemon_s", "allow_uids"}
    own = {"layout": "fused", "dtype": "engine"}
    assert shared == {name: own.get(name, defaults[name]) for name in shared}


def test_unknown_keys_are_named_all_of_them_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidOption) as caught:
        parse({"weight_cache_mod": "client", "nmae": "x", "socket_path": "/s"})
    assert str(caught.value.found).split("; ") == [
        "weight_cache_mod: unknown, did you mean weight_cache_mode?",
        "nmae: unknown, did you mean name?",
        "socket_path: unknown",
    ]
    assert "runtime_dir" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_cache_mode", "on"),
        ("layout", "hf"),
        ("timeout_s", -1),
        ("timeout_s", float("nan")),
        ("heartbeat_s", 0),
        ("dtype", "int8"),
        ("on_stale", "restart"),
        ("name", 3),
        ("allow_uids", ["root"]),
        ("timeout_s", "5"),
        ("timeout_s", True),
        ("timeout_s", 1e30),
        ("wait_for_daemon_s", float("inf")),
        ("heartbeat_s", 1e-9),
        ("heartbeat_s", float("nan")),
        ("allow_uids", ["0"]),
        ("allow_uids", [True]),
        ("allow_gids", [-1]),
        ("allow_gids", [2**32 - 1]),
        ("name", ""),
        ("name", "../x"),
        ("name", "x" * 200),
        ("draft_name", "a/b"),
        ("draft_name", "default"),
        ("runtime_dir", ""),
        ("runtime_dir", "run"),
        ("cache_dir", ""),
        ("digest", "zz"),
        ("want", ""),
        ("trusted_filesystems", [""]),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(key: str, value: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse({key: value})
    assert str(caught.value.found).startswith(f"{key}")


def test_every_value_that_cannot_be_is_named_at_once() -> None:
    with pytest.raises(InvalidOption) as caught:
        parse({"name": "../x", "timeout_s": "5", "digest": "zz", "quantization": "fp7", "allow_uids": [-1], "nmae": 1})
    keys = [one.partition(":")[0] for one in str(caught.value.found).split("; ")]
    assert keys == ["name", "quantization", "digest", "timeout_s", "allow_uids.0", "nmae"]


def test_values_as_json_has_them_are_taken() -> None:
    options = parse({"timeout_s": 5, "allow_uids": [0, 12], "trusted_filesystems": ["ext4"], "runtime_dir": "/r"})
    assert (options.timeout_s, options.allow_uids, options.trusted_filesystems) == (5.0, (0, 12), ("ext4",))


def test_a_digest_is_of_the_checkpoint() -> None:
    with pytest.raises(InvalidOption, match="want='checkpoint'"):
        parse({"digest": "0" * 64, "want": "current"})


def test_an_unknown_quantization_says_which_there_are() -> None:
    with pytest.raises(InvalidOption, match="fp8-block"):
        parse({"quantization": "fp7", "weight_cache_mode": "require"})


@pytest.mark.parametrize("mode", ["off", "client"])
def test_where_vllm_may_load_itself_there_is_no_quantization_of_ours(mode: str) -> None:
    with pytest.raises(InvalidOption, match="nothing to fall back to"):
        parse({"quantization": "int8", "weight_cache_mode": mode})
    assert parse({"quantization": "int8", "weight_cache_mode": "require"}).quantization == "int8"


@pytest.mark.parametrize("value", [None, "client", ["weight_cache_mode"]])
def test_options_that_are_no_object_are_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="not an object"):
        parse(value)


def test_a_layout_that_vllm_makes_is_named_with_its_stage() -> None:
    options = parse({"layout": "vllm", "stage": "after"})
    assert (options.layout, options.stage) == ("vllm", "after")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"stage": "after"}, "layout fused is what vLLM has before post-processing"),
        ({"layout": "vllm", "weight_cache_mode": "daemon"}, "layout 'vllm' and weight_cache_mode 'daemon'"),
        (
            {"stage": "after"},
            "--layout vllm, and a daemon of `serve --engine vllm -- --weight-cache-stage after`",
        ),
        ({"layout": "vllm", "weight_cache_mode": "require", "quantization": "fp8"}, "and quantization 'fp8'"),
        ({"layout": "vllm", "weight_cache_mode": "client", "quantization": "fp8"}, "and quantization 'fp8'"),
    ],
)
def test_what_a_layout_does_not_have_is_refused(extra: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidOption, match=named):
        parse(extra)


@pytest.mark.parametrize(
    ("extra_config", "next_step"),
    [
        ({"layout": "vllm", "weight_cache_mode": "require", "quantization": "fp8"}, "layout fused takes the daemon's"),
        ({"layout": "vllm", "weight_cache_mode": "daemon"}, "serve --engine vllm"),
    ],
)
def test_what_layout_vllm_has_not_comes_with_what_to_do(extra_config: dict[str, str], next_step: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse(extra_config)
    assert next_step in str(caught.value.next_step)
