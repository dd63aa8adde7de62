"""The command to its end, in this process: what it prints, and its exit code. Other processes: test_processes.py."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from weightcached.client.engine.command import main
from weightcached.protocol.places import Place, host_device

PROMPT = "What memcached is to objects,"


@pytest.fixture(autouse=True)
def _own_places(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("WEIGHTCACHED_CACHE_DIR", str(runtime_dir / "digests"))


def run(model: Path, *words: str) -> int:
    return main(["--model", str(model), *words])


def test_without_a_daemon_client_falls_back_says_so_and_gives_the_same_tokens(
    tiny: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--prompt", PROMPT, "--max-new-tokens", "12", "--token-ids"]
    assert run(tiny, "--weight-cache-mode", "off", *words) == 0
    off = capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        assert run(tiny, "--weight-cache-mode", "client", *words) == 0
    fallen_back = capsys.readouterr().out
    path = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0)).socket_path
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any(str(path) in record.getMessage() for record in warnings)
    ids = [line for line in off.splitlines() if line.startswith("[")]
    assert len(json.loads(ids[0])) == 12
    assert ids == [line for line in fallen_back.splitlines() if line.startswith("[")]
    assert "from disk, by Transformers" in off
    assert "from disk: no daemon" in fallen_back


def test_the_table_has_every_stage_of_a_start(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--prompt", PROMPT, "--max-new-tokens", "2") == 0
    stages = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    wanted = ["find model", "weights", "imports", "config and tokenizer", "module and bind", "first token", "total"]
    assert [stage for stage in stages if stage in wanted] == wanted


def test_json_is_one_line_with_everything_in_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--prompt", PROMPT, "--max-new-tokens", "3", "--json") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    line = json.loads(out)
    assert line["url"] is None
    assert len(line["answer"]["token_ids"]) == 3
    assert line["weights"]["source"] == "disk"
    assert line["weights"]["resident_bytes"] > 0
    seconds = line["seconds"]
    assert seconds["total"] >= seconds["weights"] + seconds["imports"] + seconds["first token"]


def test_an_encoder_embeds(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(minilm, "--weight-cache-mode", "off", "--prompt", "hello", "--json") == 0
    line = json.loads(capsys.readouterr().out)
    assert len(line["answer"]["embedding"]) == 384
    assert "first embedding" in line["seconds"]
    assert run(minilm, "--weight-cache-mode", "off", "--prompt", "hello") == 0
    assert "(384 numbers)" in capsys.readouterr().out


def test_a_prompt_that_cannot_be_answered_is_a_bad_option(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--prompt", "") == 64
    assert run(tiny, "--prompt", "x", "--max-new-tokens", "4096") == 64
    assert "context of 256" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_a_file_has_its_own_code(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    weight_map = {"model.norm.weight": "model.safetensors", "lm_head.weight": "gone.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert run(model, "--prompt", "x") == 6
    assert "missing_shard" in capsys.readouterr().err
