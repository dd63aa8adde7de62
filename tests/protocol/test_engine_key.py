"""What an engine's key may hold, and what it makes of a config."""

import json
from pathlib import Path

import pytest

from weightcached.protocol.config import CacheConfig, build_config, explain_differences
from weightcached.protocol.engine_key import ENTRIES_MAX, KEY_MAX_BYTES, EngineKey
from weightcached.protocol.errors import EngineFailed, FieldDifference, InvalidOption


@pytest.fixture
def model_dir(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ToyForCausalLM"], "hidden_size": 16}))
    return tmp_path


def config_of(model_dir: Path, **entries) -> CacheConfig:
    key = EngineKey.of("toy", 3, {"version": "1.0", "packing": 4, **entries})
    return build_config(model_dir, layout="toy", engine=key, tp_size=1, tp_rank=0)


def test_a_config_carries_the_entries_and_has_the_engine_s_name_and_revision_for_its_layout(model_dir: Path) -> None:
    config = config_of(model_dir, switches={"A": "1"})
    assert (config.layout, config.layout_revision) == ("toy", 3)
    assert config.entries()["engine.switches"] == {"A": "1"}
    assert CacheConfig.model_validate(config.model_dump()).fingerprint == config.fingerprint


def test_every_entry_changes_the_fingerprint_and_is_named_where_it_differs(model_dir: Path) -> None:
    ours, theirs = config_of(model_dir), config_of(model_dir, packing=2)
    assert ours.fingerprint != theirs.fingerprint
    assert explain_differences(ours.entries(), theirs.entries()) == (FieldDifference("engine.packing", 4, 2),)
    assert config_of(model_dir, more=None).fingerprint != ours.fingerprint


def test_a_config_without_an_engine_has_no_such_field(model_dir: Path) -> None:
    """What earlier releases made keeps its fingerprint; test_config.py pins one."""
    config = build_config(model_dir, layout="hf", tp_size=1, tp_rank=0)
    assert "engine" not in config.model_dump()
    assert CacheConfig.model_validate({**config.model_dump(), "engine": None}).fingerprint == config.fingerprint


def test_nothing_changes_the_entries_later(model_dir: Path) -> None:
    entries = {"versions": ["1"], "switches": {"A": "1"}}
    key = EngineKey.of("toy", 1, entries)
    config = build_config(model_dir, layout="toy", engine=key, tp_size=1, tp_rank=0)
    before = config.fingerprint
    entries["versions"].append("2")  # type: ignore[attr-defined]
    assert config.model_copy().fingerprint == before
    assert config.engine is not None
    with pytest.raises(TypeError):
        config.engine["switches"]["A"] = "2"


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "toy"},
        {"layout": "hf", "engine": EngineKey.of("toy", 1, {"version": "1"})},
        {"layout": "other", "engine": EngineKey.of("toy", 1, {"version": "1"})},
        {"layout": "toy", "engine": EngineKey.of("toy", 1, {"version": "1"}), "quantization": "fp8"},
    ],
    ids=["no key", "a layout of ours", "another engine's", "our quantization"],
)
def test_a_layout_and_a_key_that_do_not_belong_together_are_refused(model_dir: Path, options) -> None:
    with pytest.raises(InvalidOption):
        build_config(model_dir, tp_size=1, tp_rank=0, **options)


@pytest.mark.parametrize(("layout", "engine"), [("hf", {"version": "1"}), ("toy", None)])
def test_no_config_says_it_was_made_by_two_or_by_nobody(model_dir: Path, layout: str, engine: object) -> None:
    with pytest.raises(ValueError, match=layout):
        CacheConfig.model_validate({**config_of(model_dir).model_dump(), "layout": layout, "engine": engine})


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"": "empty"},
        {1: "a number"},
        {"dtype": object()},
        {"huge": 1 << 70},
        {"long": "x" * KEY_MAX_BYTES},
        {str(number): number for number in range(ENTRIES_MAX + 1)},
    ],
    ids=["none", "no name", "no text", "no JSON", "no 64 bits", "too long", "too many"],
)
def test_entries_that_no_frame_could_carry_are_the_adapter_s_fault(entries) -> None:
    with pytest.raises(EngineFailed, match="toy"):
        EngineKey.of("toy", 1, entries)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("-inf")], {"a": {"b": [float("nan")]}}])
def test_a_number_that_is_not_finite_is_refused_by_its_entry_s_name(value: object) -> None:
    with pytest.raises(EngineFailed, match=r"'scale' holds (nan|-?inf)"):
        EngineKey.of("toy", 1, {"version": "1", "scale": value})
