"""``weightcached verify``: equal where all is well, and every way in which it is not is told by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import RawTensor, raw_tensor, tiny_config, tiny_llama, tiny_shapes, write_checkpoint
from tests.support.daemons import daemon
from weightcached.client import attach
from weightcached.client.verify import against_disk, against_manifest
from weightcached.client.verify_command import main
from weightcached.loader.reference import reference
from weightcached.protocol.config import build_config
from weightcached.protocol.places import Place

Said = Callable[..., tuple[int, str]]


@pytest.fixture
def runtime_dir(place: Place) -> Path:
    return place.runtime_dir


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], runtime_dir: Path) -> Said:
    """Runs the command in this process: (exit code, standard output)."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main([*map(str, arguments), "--runtime-dir", str(runtime_dir)])
        return code, capsys.readouterr().out

    return run


def findings(output: str, against: str) -> dict[str, tuple[str, str]]:
    """Name → (verdict, why) of the only rank."""
    (rank,) = json.loads(output)["ranks"]
    return {one["name"]: (one["verdict"], one["why"]) for one in rank[against]}


def rewritten(directory: Path, **tensors: RawTensor) -> None:
    """The same checkpoint with some tensors replaced or added."""
    config = tiny_config()
    all_tensors = {name: raw_tensor(name, shape) for name, shape in tiny_shapes(config).items()} | tensors
    write_checkpoint(directory, config, {"model.safetensors": all_tensors})


def test_all_ranks_are_equal_to_manifest_and_disk(tmp_path: Path, runtime_dir: Path, said: Said) -> None:
    directory = tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    options: dict[str, Any] = {"layout": "fused", "quantization": "fp8", "tp_size": 2}
    words = ["--layout", "fused", "--quantization", "fp8", "--tp-size", 2]
    with (
        daemon(directory, runtime_dir, **options, tp_rank=0) as first,
        daemon(directory, runtime_dir, **options, tp_rank=1) as second,
    ):
        first.wait_until("ready")
        second.wait_until("ready")
        code, output = said(directory, *words, "--against-disk", "--json")
        assert code == 0
        ranks = json.loads(output)["ranks"]
        assert [rank["rank"] for rank in ranks] == ["tp0of2", "tp1of2"]
        for rank in ranks:
            assert {one["verdict"] for one in rank["manifest"]} == {one["verdict"] for one in rank["disk"]} == {"equal"}
            assert len(rank["disk"]) == len(rank["manifest"]) + 1  # the tied head is another name of one place
        code, output = said(directory, *words, "--against-disk")
        lines = [" ".join(line.split()) for line in output.splitlines()]
        assert "model.layers.*.self_attn.qkv_proj.weight_scale 2 equal" in lines
        assert "rank tp1of2 against disk:" in lines
        code, output = said(directory, *words, "--tp-rank", 1)
        assert code == 0
        assert len(output.splitlines()) == 2  # a heading and the rank


def test_each_difference_from_disk_is_named(tmp_path: Path, runtime_dir: Path, said: Said) -> None:
    """Files that were changed after they were loaded: a bit, a tensor more, a tensor less."""
    directory = tmp_path / "m"
    rewritten(directory)
    with daemon(directory, runtime_dir, layout="fused") as served:
        served.wait_until("ready")
        name = "model.layers.1.self_attn.v_proj.weight"
        good = raw_tensor(name, (16, 32))
        flipped = bytearray(good.data)
        flipped[2 * (5 * 32 + 3)] ^= 1
        rewritten(directory, **{name: RawTensor("BF16", (16, 32), bytes(flipped)), "stray": raw_tensor("s", (2,))})
        code, output = said(directory, "--layout", "fused", "--against-disk", "--json")
        assert code == 1
        found = findings(output, "disk")
        fused = "model.layers.1.self_attn.qkv_proj.weight"
        assert {name for name, (verdict, _) in found.items() if verdict != "equal"} == {fused, "stray"}
        assert found["stray"][0] == "missing"
        assert found[fused][0] == "differs"
        assert f"1 of {64 * 32} elements, the first is {(32 + 16 + 5) * 32 + 3}" in found[fused][1]
        assert {verdict for verdict, _ in findings(output, "manifest").values()} == {"equal"}
        code, output = said(directory, "--layout", "fused", "--against-disk")
        assert code == 1
        assert fused in output  # not folded with the same parameter of other layers
        os.truncate(directory / "model.safetensors", 3000)
        assert said(directory, "--layout", "fused", "--against-disk") == (3, "")
        assert said(directory, "--layout", "fused")[0] == 0  # what is resident is what it was


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("self_attn.v_proj.weight", (16, 30)),  # its neighbours have 32 columns
        ("mlp.down_proj.weight", (32, 47)),  # two ranks cannot share that
        ("mlp.down_proj.weight", (32,)),
    ],
)
def test_tensors_on_disk_that_do_not_go_together_are_a_difference(
    tmp_path: Path, tensor: str, shape: tuple[int, ...]
) -> None:
    directory = tmp_path / "m"
    rewritten(directory)
    options: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1}
    config = build_config(directory, **options)
    with attach(directory, mode="off", **options) as weights:
        name = f"model.layers.1.{tensor}"
        rewritten(directory, **{name: raw_tensor(name, shape)})
        found = [one for one in against_disk(weights, directory, config) if one.verdict != "equal"]
    assert [(one.name, one.verdict) for one in found] == [(name.replace("v_proj", "qkv_proj"), "differs")]


def test_a_tensor_that_is_gone_from_disk_is_extra_in_memory(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    rewritten(directory, more=raw_tensor("more", (3,)))
    config = build_config(directory, layout="hf", tp_size=1, tp_rank=0)
    with attach(directory, mode="off") as weights:
        rewritten(directory)
        found = {one.name: one.verdict for one in against_disk(weights, directory, config)}
    assert found.pop("more") == "extra"
    assert set(found.values()) == {"equal"}


@pytest.mark.parametrize("layout", ["hf", "fused"])
def test_resident_bytes_that_are_not_the_manifests(model: Path, layout: str) -> None:
    """Only pages of one's own can be written; a sealed segment cannot."""
    with attach(model, mode="off", layout=layout) as weights:
        assert {one.verdict for one in against_manifest(weights)} == {"equal"}
        name = "model.layers.0.mlp.down_proj.weight"
        weights[name][31, 47] += 1
        differing = [one.name for one in against_manifest(weights) if one.verdict == "differs"]
        assert differing == weights.differing() == [name]
        config = build_config(model, layout=layout, tp_size=1, tp_rank=0)
        (found,) = [one for one in against_disk(weights, model, config) if one.verdict != "equal"]
        assert found.name == name
        assert "1 of 1536 elements, the first is 1535" in found.why


def test_what_the_reference_does_not_know_is_not_called_equal(
    model: Path, runtime_dir: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ARCHITECTURES", frozenset())
    with daemon(model, runtime_dir, layout="fused") as served:
        served.wait_until("ready")
        code, output = said(model, "--layout", "fused", "--against-disk", "--json")
        assert code == 2
        assert {verdict for verdict, _ in findings(output, "disk").values()} == {"not compared"}
        assert said(model, "--layout", "fused")[0] == 0


def test_where_there_is_nothing_to_verify(model: Path, runtime_dir: Path, said: Said) -> None:
    code, output = said(model, "--json")
    assert code == 3
    assert json.loads(output)["error"]["code"] == "daemon_absent"
    with daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        code, output = said(model, "--json", "--dtype", "float32")
        assert code == 3
        assert json.loads(output)["error"]["code"] == "config_mismatch"
        assert said(model)[0] == 0
    assert said(model, "--tp-rank", 1) == (64, "")
