"""The config half of a key: what it holds, that nothing changes it, that it is the same everywhere, how two differ."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.protocol.canonical import canonical_bytes
from weightcached.protocol.config import (
    ABBREVIATE_OVER_BYTES,
    LAYOUT_REVISIONS,
    CacheConfig,
    Parallel,
    abbreviated,
    build_config,
    differing_entries,
    explain_differences,
    provenance_of,
    read_model_config,
)
from weightcached.protocol.errors import ABSENT, FieldDifference, InvalidOption, ModelConfigError
from weightcached.protocol.quantization import Quantization

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "sliding_window": None,
    "layer_types": ["full", "sliding"],
    "transformers_version": "4.0",
}
CANONICAL = (
    b'{"architecture":"LlamaForCausalLM","device":"cpu","dtype":"auto","layout":"fused","layout_revision":1,'
    b'"memory":"host","model":{"architectures":["LlamaForCausalLM"],"hidden_size":64,"layer_types":["full","sliding"],'
    b'"rms_norm_eps":{"$float":"0x1.4f8b588e368f1p-17"},"rope_scaling":{"factor":{"$float":"0x1.0000000000000p+3"},'
    b'"rope_type":"llama3"},"sliding_window":null},"parallel":{"dp_rank":0,"dp_size":1,"ep_rank":0,"ep_size":1,'
    b'"expert_placement":"linear","pp_rank":0,"pp_size":1,"tp_rank":1,"tp_size":2},'
    b'"quantization":{"granularity":null,"method":"none"},"schema_version":1}'
)
PINNED = hashlib.sha256(CANONICAL).hexdigest()


@pytest.fixture
def model_dir(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def config_of(**changes) -> CacheConfig:
    values = {
        "architecture": "LlamaForCausalLM",
        "layout": "fused",
        "layout_revision": 1,
        "parallel": Parallel(tp_size=2, tp_rank=1),
        "model": {key: value for key, value in MODEL.items() if key != "transformers_version"},
    }
    return CacheConfig(**{**values, **changes})


def test_the_fingerprint_is_pinned(model_dir: Path) -> None:
    """A change of this value makes every running cache miss: bump SCHEMA_VERSION or LAYOUT_REVISIONS and say so."""
    config = build_config(model_dir, layout="fused", tp_size=2, tp_rank=1)
    assert canonical_bytes(config.model_dump()) == CANONICAL
    assert config.fingerprint == PINNED == "0fc4a9ca57a35163181a0f464aa2bc50b5bc1ede9b864862cfc28e7cdd68ed5a"
    assert config_of().fingerprint == PINNED


def test_the_fingerprint_is_the_same_in_every_process(model_dir: Path) -> None:
    program = (
        "import pathlib, sys; from weightcached.protocol.config import build_config;"
        "print(build_config(pathlib.Path(sys.argv[1]), layout='fused', tp_size=2, tp_rank=1).fingerprint)"
    )
    for seed in ("0", "1", "4294967295"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        output = subprocess.run(
            [sys.executable, "-c", program, model_dir], env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == PINNED


def leaves(value: object, path: tuple[str, ...] = ()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path


OTHER_VALUES: dict[tuple[str, ...], object] = {
    ("layout",): "hf",
    ("layout_revision",): 2,
    ("architecture",): "MistralForCausalLM",
    ("dtype",): "float16",
    ("parallel", "expert_placement"): "round_robin",
    ("quantization", "method"): "fp8",
    ("quantization", "granularity"): "channel",
    ("quantization", "block"): (64, 64),
    ("quantization", "group"): 64,
    ("quantization", "symmetric"): False,
    ("parallel", "tp_rank"): 0,
    **{("parallel", f"{kind}_size"): 5 for kind in ("tp", "pp", "ep", "dp")},
    **{("parallel", f"{kind}_rank"): 1 for kind in ("pp", "ep", "dp")},
}
ONE_VALUE = {("schema_version",), ("memory",), ("device",)}
"""Fields that have a single allowed value in this release: no other can be tried."""


@pytest.mark.parametrize("path", list(leaves(config_of().model_dump())), ids=".".join)
def test_every_field_is_in_the_fingerprint(path: tuple[str, ...]) -> None:
    """Checked over the dump itself, so that a field added later is tried too."""
    dump = config_of(parallel=Parallel(tp_size=2, tp_rank=1, pp_size=4, ep_size=4, dp_size=4)).model_dump()
    before = CacheConfig.model_validate(dump).fingerprint
    holder = dump
    for key in path[:-1]:
        holder = holder[key]
    if path in ONE_VALUE:
        del holder[path[-1]]  # the default is that value
        assert CacheConfig.model_validate(dump).fingerprint == before
        assert f'"{path[-1]}":' in canonical_bytes(CacheConfig.model_validate(dump).model_dump()).decode()
        return
    holder[path[-1]] = OTHER_VALUES.get(path, "another value")
    assert CacheConfig.model_validate(dump).fingerprint != before


def test_a_null_is_not_an_absent_field() -> None:
    without = {key: value for key, value in MODEL.items() if key != "sliding_window"}
    assert config_of(model=without).fingerprint != config_of(model={**without, "sliding_window": None}).fingerprint


def test_an_integer_is_not_a_float() -> None:
    assert config_of(model={"factor": 8}).fingerprint != config_of(model={"factor": 8.0}).fingerprint


def test_ranks_are_left_out_of_the_rankless_fingerprint_and_nothing_else_is() -> None:
    ranks = [config_of(parallel=Parallel(tp_size=4, tp_rank=rank)) for rank in range(4)]
    assert len({config.rankless_fingerprint for config in ranks}) == 1
    assert len({config.fingerprint for config in ranks}) == 4
    other_size = config_of(parallel=Parallel(tp_size=8, tp_rank=0))
    assert other_size.rankless_fingerprint != ranks[0].rankless_fingerprint


def test_fields_that_no_loader_looks_at_are_not_in_the_key(model_dir: Path) -> None:
    before = build_config(model_dir, layout="hf", tp_size=1, tp_rank=0)
    (model_dir / "config.json").write_text(json.dumps({**MODEL, "transformers_version": "5.0", "use_cache": False}))
    assert build_config(model_dir, layout="hf", tp_size=1, tp_rank=0).fingerprint == before.fingerprint


def test_a_loader_that_changes_its_own_config_cannot_change_the_key() -> None:
    """vLLM and SGLang pop keys of the quantization config while they load; the hash then never matches again."""
    source: dict[str, Any] = {"quantization_config": {"bits": 4, "groups": [1, 2]}}
    config = config_of(model=source)
    before = config.fingerprint
    source["quantization_config"].pop("bits")
    source["quantization_config"]["groups"].append(3)
    copied = config.model_dump()
    copied["model"]["quantization_config"]["groups"].append(3)
    config.entries()["model.quantization_config"].clear()
    assert config.model_copy().fingerprint == before == config_of(model=config.model_dump()["model"]).fingerprint


def test_the_config_itself_refuses_changes() -> None:
    config = config_of()
    with pytest.raises(ValueError, match="frozen"):
        config.dtype = "float16"
    with pytest.raises(TypeError):
        config.model["hidden_size"] = 1  # type: ignore[index]  # what is tried
    with pytest.raises(TypeError):
        config.model["rope_scaling"]["factor"] = 1.0
    with pytest.raises(AttributeError):
        config.model["layer_types"].append("full")


def test_a_copy_with_other_values_has_its_own_fingerprint_and_is_checked() -> None:
    config = config_of()
    before = config.fingerprint
    other = config.model_copy(update={"parallel": Parallel(tp_size=2, tp_rank=0)})
    assert other.fingerprint != before
    assert other.rankless_fingerprint == config.rankless_fingerprint
    with pytest.raises(ValueError, match="layout_revision"):
        config.model_copy(update={"layout_revision": "two"})


@pytest.mark.parametrize("layout", LAYOUT_REVISIONS)
def test_a_config_says_which_rules_made_it(model_dir: Path, layout: str) -> None:
    config = build_config(
        model_dir, layout=layout, tp_size=2, tp_rank=1, dtype="bfloat16", quantization="fp8"
    ).model_dump()
    assert config["architecture"] == "LlamaForCausalLM"
    assert config["layout_revision"] == LAYOUT_REVISIONS[layout]
    assert config["dtype"] == "bfloat16"
    assert config["quantization"] == Quantization.named("fp8").model_dump()
    assert config["model"] == {key: value for key, value in MODEL.items() if key != "transformers_version"}
    assert (config["parallel"]["tp_size"], config["parallel"]["tp_rank"]) == (2, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "exotic"},
        {"tp_rank": 2},
        {"tp_rank": -1},
        {"tp_size": 0, "tp_rank": 0},
        {"dtype": "int8"},
        {"quantization": "fp4"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(model_dir: Path, options) -> None:
    with pytest.raises(InvalidOption):
        build_config(model_dir, **{"layout": "hf", "tp_size": 2, "tp_rank": 0, **options})


def test_the_rank_is_never_defaulted(model_dir: Path) -> None:
    with pytest.raises(TypeError):
        build_config(model_dir, layout="hf", tp_size=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="tp_rank"):
        Parallel(tp_size=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"architectures": []}',
        b'{"architectures": ["A", "B"]}',
        b'{"architectures": "A"}',
        b"{}",
        b'{"architectures": ["A"], "deep": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"architectures": ["A"], "deeper": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"architectures": ["A"], "number": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda content: content[:40].decode("latin-1"),
)
def test_a_config_file_that_cannot_be_used_is_named(model_dir: Path, content: bytes) -> None:
    (model_dir / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError) as raised:
        build_config(model_dir, layout="hf", tp_size=1, tp_rank=0)
    assert str(raised.value.where) == str(model_dir / "config.json")


def test_a_missing_and_an_oversized_config_file_are_named(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    with pytest.raises(ModelConfigError, match="No such file"):
        read_model_config(model_dir)
    with open(model_dir / "config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelConfigError, match="too large"):
        read_model_config(model_dir)


LONG = {str(number): f"label {number}" for number in range(200)}


def test_a_long_value_travels_as_its_digest() -> None:
    encoded = canonical_bytes(LONG)
    assert len(encoded) > ABBREVIATE_OVER_BYTES
    assert abbreviated({"model.id2label": LONG, "dtype": "auto"}) == {
        "model.id2label": {"$sha256": hashlib.sha256(encoded).hexdigest(), "$nbytes": len(encoded)},
        "dtype": "auto",
    }


def test_the_limit_is_inclusive() -> None:
    longest = "x" * (ABBREVIATE_OVER_BYTES - 2)
    assert abbreviated({"a": longest, "b": longest + "x"})["a"] == longest
    assert "$sha256" in abbreviated({"b": longest + "x"})["b"]


def test_a_value_that_looks_like_an_abbreviation_does_not_pass_for_one() -> None:
    imitation = abbreviated({"a": LONG})["a"]
    assert differing_entries({"a": imitation}, abbreviated({"a": LONG})) == ["a"]
    assert differing_entries({"a": LONG}, abbreviated({"a": imitation})) == ["a"]
    assert differing_entries({"a": imitation}, abbreviated({"a": imitation})) == []


VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text(max_size=3)
ENTRIES = st.dictionaries(
    st.sampled_from("abcd"), VALUES | st.lists(VALUES) | st.just(LONG) | st.dictionaries(st.sampled_from("xy"), VALUES)
)


@given(ENTRIES, ENTRIES)
def test_differing_entries_are_exactly_those_that_differ(ours, theirs) -> None:
    expected = [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if (name in ours) != (name in theirs) or canonical_bytes(ours[name]) != canonical_bytes(theirs[name])
    ]
    assert differing_entries(ours, abbreviated(theirs)) == expected


@given(ENTRIES, ENTRIES)
def test_what_differs_is_always_explained(daemon, client) -> None:
    """An explanation that names nothing would be a mismatch nobody can act on."""
    explained = {difference.field.split(".")[0] for difference in explain_differences(daemon, client)}
    assert explained == set(differing_entries(daemon, abbreviated(client)))


def test_differences_name_the_leaf_and_tell_absent_from_null() -> None:
    daemon = {"model.rope": {"factor": 8.0, "type": "llama3"}, "dtype": "auto", "null": None, "same": [1]}
    client = {"model.rope": {"factor": 4.0, "base": 1}, "dtype": "float16", "same": [1]}
    assert explain_differences(daemon, client) == (
        FieldDifference("dtype", "auto", "float16"),
        FieldDifference("model.rope.base", ABSENT, 1),
        FieldDifference("model.rope.factor", 8.0, 4.0),
        FieldDifference("model.rope.type", "llama3", ABSENT),
        FieldDifference("null", None, ABSENT),
    )


def test_real_configs_that_differ_name_their_fields() -> None:
    daemon = config_of()
    client = config_of(dtype="float16", model={**MODEL, "hidden_size": 128}, quantization=Quantization.named("fp8"))
    assert differing_entries(daemon.entries(), abbreviated(client.entries())) == [
        "dtype",
        "model.hidden_size",
        "model.transformers_version",
        "quantization.granularity",
        "quantization.method",
    ]


def test_a_peers_unabbreviated_value_differs_without_being_encoded() -> None:
    """Encoding it canonically would cost tens of milliseconds that other clients wait for."""
    assert differing_entries({"a": 1}, {"a": [[]] * 60_000}) == ["a"]
    assert differing_entries({"a": LONG}, {"a": LONG}) == ["a"]


def test_provenance_describes_and_never_fails_on_odd_paths(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    plain = provenance_of(snapshot)
    assert (plain.path, plain.revision, plain.tokenizer_sha256) == (str(snapshot), "0123abc", None)
    (snapshot / "tokenizer.json").write_text("{}")
    with_tokenizer = provenance_of(snapshot)
    assert with_tokenizer.tokenizer_sha256
    (snapshot / "tokenizer.json").write_text("{ }")
    assert provenance_of(snapshot).tokenizer_sha256 != with_tokenizer.tokenizer_sha256
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    assert provenance_of(odd).path == f"{tmp_path}/\\xff"
    assert provenance_of(odd).revision is None
