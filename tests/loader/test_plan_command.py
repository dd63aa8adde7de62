"""``weightcached plan``: what it says is what a load then does, and it reads headers and nothing else."""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import (
    make_checkpoint,
    raw_tensor,
    tiny_config,
    tiny_llama,
    tiny_shapes,
    write_checkpoint,
)
from tests.support.costs import costs_at_most
from tests.support.execution import load
from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.plan_command import main
from weightcached.protocol.config import build_config


@pytest.fixture
def said(capsys):
    """Runs the command in this process: (exit code, standard output)."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return run


def sparse_checkpoint(directory: Path, **overrides: object) -> Path:
    """A checkpoint whose header is whole and whose weights are one hole."""
    config = tiny_config(**overrides)
    header, offset = {}, 0
    for name, shape in tiny_shapes(config).items():
        end = offset + math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    text = json.dumps(header, separators=(",", ":")).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return directory


def tp_rank_of(rank: dict[str, Any]) -> int:
    return rank["config"]["parallel"]["tp_rank"]


@pytest.mark.parametrize("options", [{"layout": "hf"}, {"layout": "fused", "tp_size": 2, "quantization": "fp8"}])
def test_the_json_is_what_a_load_does(tmp_path, said, options):
    directory = tiny_llama(tmp_path, shards=2, vocab_size=70, tie_word_embeddings=True)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, output = said(directory, *words, "--json")
    assert code == 0
    document = json.loads(output)
    assert [tp_rank_of(rank) for rank in document["ranks"]] == list(range(options.get("tp_size", 1)))
    for rank in document["ranks"]:
        outcome = load(directory, **{"tp_size": 1, **options, "tp_rank": tp_rank_of(rank)})
        planned = {
            one["name"]: (one["shape"], one["dtype"], one["offset"], one["nbytes"]) for one in rank["parameters"]
        }
        assert planned == {
            row.name: (list(row.shape), row.dtype, row.offset, row.nbytes) for row in outcome.loaded.rows
        }
        figures = outcome.loaded.figures
        kinds = rank["kinds"]
        assert {kind: row["kept_nbytes"] for kind, row in kinds.items() if row["kept_nbytes"]} == {
            kind: traffic.kept for kind, traffic in figures.traffic.items() if traffic.kept
        }
        assert sum(row["read_nbytes"] for row in kinds.values()) >= figures.bytes_read
        assert rank["segments_nbytes"] == [outcome.prepared.placement.nbytes]
        assert sorted(rank["accounting"]["loaded"]) == sorted(outcome.prepared.plan.accounting.loaded)
        assert rank["fingerprint"] == outcome.prepared.plan.config.fingerprint


def test_the_tables_say_what_goes_where_and_what_is_ignored_and_why(tmp_path, said):
    config = tiny_config(vocab_size=70, tie_word_embeddings=True)
    tensors = {name: raw_tensor(name, shape) for name, shape in tiny_shapes(config).items()}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[name] = raw_tensor(name, (4,), "F32")
    write_checkpoint(tmp_path, config, {"model.safetensors": tensors})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, output = said(tmp_path, "--layout", "fused", "--tp-size", 2)
    assert code == 0
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "RANK PARAMETERS READ KEPT RESIDENT EXPECTED LOADED IGNORED UNEXPECTED" in lines
    for line in (
        "model.layers.*.self_attn.qkv_proj.weight 2 column 32×32 bfloat16 "
        "q_proj.weight[0:16, :] + k_proj.weight[0:8, :] + v_proj.weight[0:8, :]",
        "model.layers.*.mlp.down_proj.weight 2 row 32×24 bfloat16 model.layers.*.mlp.down_proj.weight[:, 0:24]",
        "model.norm.weight 1 replicated 32 bfloat16 model.norm.weight",
        "lm_head.weight 1 vocabulary 64×32 bfloat16 the same as model.embed_tokens.weight",
        "model.layers.*.self_attn.rotary_emb.inv_freq 2 a rotary table: the engine computes it from config.json",
        "pytorch_model.bin 1 pickle files are never opened",
    ):
        assert line in lines, output
    assert any(
        line.startswith("vocabulary tp1of2 2 ") for line in lines
    )  # the last rank reads less, and is its own row
    code, other = said(tmp_path, "--layout", "fused", "--tp-size", 2, "--tp-rank", 1)
    assert "zeros [6:64, :]" in other
    assert "rank tp1of2:" in other


def test_stages_and_experts(tmp_path, said):
    """What one rank leaves to another is not called ignored where both are planned; experts that are alike are one."""
    directory = make_checkpoint(tmp_path, "mixtral")
    stages = ("--layout", "fused", "--pp-size", 2)
    code, both = said(directory, *stages)
    assert code == 0
    assert "ignored:" not in both
    assert "tp0of1-pp1of2" in both
    assert " (*.w1.weight + *.w3.weight) × 4" in both
    code, one = said(directory, *stages, "--pp-rank", 0)
    assert "of another pipeline stage" in one


def test_no_weight_is_read(tmp_path, said):
    """The kernel's count of bytes that this process read is less than the header and config.json come to twice."""
    directory = sparse_checkpoint(tmp_path, hidden_size=1024, intermediate_size=2048, vocab_size=32000)
    file = directory / "model.safetensors"
    with open(file, "rb") as opened:
        header_nbytes = int.from_bytes(opened.read(8), "little")
    said(directory)  # imports, once
    before = _read_nbytes()
    assert said(directory, "--layout", "fused", "--tp-size", 2)[0] == 0
    assert _read_nbytes() - before < 2 * header_nbytes + (64 << 10) < file.stat().st_size / 99


def _read_nbytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_exit_codes(tmp_path, said):
    directory = tiny_llama(tmp_path / "good")
    broken = tiny_llama(tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 100)
    assert said(directory)[0] == 0
    assert said(broken) == (1, "")
    assert said(directory, "--tp-size", 2) == (1, "")  # layout hf has one rank
    assert said(directory, "--tp-size", 2, "--tp-rank", 2) == (64, "")
    assert said(directory, "--tp-size", 2, "--pp-rank", 1) == (64, "")
    code, output = said(broken, "--json")
    assert code == 1
    assert json.loads(output)["error"]["code"] == "truncated_file"
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 64


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """A checkpoint of 100,000 tensors."""
    return sparse_checkpoint(tmp_path_factory.mktemp("huge"), num_hidden_layers=11_111)


@pytest.mark.parametrize("options", [{"layout": "hf"}, {"layout": "fused", "tp_size": 4}])
def test_the_time_to_open_and_plan_grows_with_the_number_of_tensors_and_no_faster(huge, tmp_path, options):
    """From 10,000 to 100,000. What it takes on this machine: `make bench BENCH_ARGS=plan`."""

    def planned(directory):
        with open_checkpoint(directory) as checkpoint:
            pipeline.prepare(checkpoint, build_config(directory, **{"tp_size": 1, "tp_rank": 0, **options}))
            return len(checkpoint.tensors)

    tenth = sparse_checkpoint(tmp_path, num_hidden_layers=1_111)
    assert planned(huge) >= 100_000
    assert costs_at_most(20, lambda: planned(huge), of=lambda: planned(tenth))


_PROGRAM = """
import sys
from weightcached.loader.plan_command import main
status = main(sys.argv[1:])
sys.stderr.write(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


def test_the_command_plans_100_000_tensors_within_200_mib(huge):
    """All of the process, the interpreter included."""
    words = [str(huge), "--layout", "fused", "--tp-size", "4", "--tp-rank", "0", "--quantization", "fp8"]
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, *words], check=True, capture_output=True, text=True)
    assert int(ended.stderr) << 10 <= 200 << 20
