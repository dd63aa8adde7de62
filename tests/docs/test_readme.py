"""The README's commands and code do what they are shown to do: each marked block is run as it is written.

A block is marked by ``<!-- run: NAME -->`` on the line before it. Blocks of commands run in one shell, in order, with a
small checkpoint as ``$MODEL``; Python blocks become files. Commands that are not marked are those that install.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commanding import other_weights
from weightcached.client.demo.checkpoint import make_checkpoint

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"^<!-- run: (?P<name>\S+) -->\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
TIMEOUT_S = 300


def blocks() -> dict[str, tuple[str, str]]:
    """Name → (language, text) of every marked block."""
    return {found["name"]: (found["language"], found["text"]) for found in _BLOCK.finditer(README.read_text())}


def commands(name: str) -> str:
    """The commands of a console block, without its prompts."""
    language, text = blocks()[name]
    assert language == "console"
    lines = text.splitlines()
    assert all(line.startswith("$ ") for line in lines), "a console block shows commands only"
    return "\n".join(line.removeprefix("$ ") for line in lines)


class Shell:
    """Runs scripts as a reader's shell would: this environment's commands first on the path, jobs in the background."""

    def __init__(self, home: Path, model: Path) -> None:
        self.directory = home
        self.environment = os.environ | {
            "HOME": str(home),
            "MODEL": str(model),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "WEIGHTCACHED_RUNTIME_DIR": str(home / ".weightcached"),
            "WEIGHTCACHED_CACHE_DIR": str(home / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, script: str, *, then: str = "") -> str:
        """Standard output of ``script``, then of ``then``. Every line has to succeed; what was started is ended."""
        ended = "kill $(jobs -p) 2>/dev/null || true; wait"
        process = subprocess.Popen(
            ["bash", "-c", f"set -eo pipefail\ntrap '{ended}' EXIT\n{script}\n{then}"],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.returncode == 0, f"exit {process.returncode}\n{output}\n{errors}"
        return output


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    # pytest's own folders make socket paths that are too long.
    with tempfile.TemporaryDirectory(prefix="wc-docs-", dir="/tmp") as home:
        model = make_checkpoint(tmp_path / "model", nbytes=4 << 20).directory
        yield Shell(Path(home), model)


def test_every_marked_block_is_run_by_a_test() -> None:
    assert blocks().keys() == {
        *("serve", "attach.py", "model.py", "nearest.py", "engine", "up", "supervise", "plan", "verify", "snapshot"),
        *("several", "draft.py", "merge.py", "update", "trainer.py", "publish"),
    }


@pytest.mark.timeout(TIMEOUT_S)
def test_serve_attach_and_engine(shell: Shell) -> None:
    for file in ("attach.py", "model.py", "nearest.py"):
        (shell.directory / file).write_text(blocks()[file][1])
    programs = 'python attach.py "$MODEL"\npython model.py "$MODEL"'
    programs += '\npython -X importtime nearest.py "$MODEL" 7 2> imported'
    output = shell.run(commands("serve"), then=f"{programs}\n{commands('engine')}")
    assert re.search(r"^default/host-tp0of1 +ready", output, re.M)
    assert re.search(r"^\d+ tensors, \d+ bytes from daemon, version (digest|receipts):[0-9a-f]{64}$", output, re.M)
    assert re.search(r"^\d+ parameters, \d{6,} bytes of them shared$", output, re.M)
    assert re.search(r"^\w+ForCausalLM of version (digest|receipts):[0-9a-f]{64}$", output, re.M)
    predictions = re.findall(r"^tensor\(\[\[.*\]\]\)$", output, re.M)
    assert len(predictions) == 2, output
    assert predictions[0] == predictions[1]
    assert re.search(r"^bfloat16\[\d+, \d+\]: nearest to token 7 are \[7, \d+, \d+\]$", output, re.M)
    assert not re.search(r"\btorch$", (shell.directory / "imported").read_text(), re.M)
    answers = re.findall(r"^(.+)\n\nstage ", output, re.M)
    assert len(answers) == 2, output
    assert answers[0] == answers[1]


@pytest.mark.timeout(TIMEOUT_S)
def test_all_ranks_quantized(shell: Shell) -> None:
    check = """python - "$MODEL" <<'PYTHON'
import sys
from weightcached.client import attach
for rank in (0, 1):
    with attach(sys.argv[1], mode="require", layout="fused", tp_size=2, tp_rank=rank, quantization="fp8",
                name="my-model-fp8") as weights:
        qkv = weights["model.layers.0.self_attn.qkv_proj.weight"]
        print(rank, weights.source, qkv.dtype, tuple(weights["model.layers.0.self_attn.qkv_proj.weight_scale"].shape))
PYTHON"""
    output = shell.run(commands("up"), then=check)
    for rank in (0, 1):
        assert re.search(rf"^{rank} daemon torch.float8_e4m3fn \(\d+, 1\)$", output, re.M)


@pytest.mark.timeout(TIMEOUT_S)
def test_weights_outlive_their_daemon(shell: Shell) -> None:
    output = shell.run(commands("supervise"), then="! ls .weightcached/kept/*.sock")
    generations = re.findall(r"^[0-9a-f]{32}$", output, re.M)
    assert len(generations) == 2, output
    assert generations[0] == generations[1]


@pytest.mark.timeout(TIMEOUT_S)
def test_updated_and_rolled_back(shell: Shell, tmp_path: Path) -> None:
    model = Path(shell.environment["MODEL"])
    shell.environment["NEWER"] = str(other_weights(model, tmp_path / "newer"))
    output = shell.run(commands("update"))
    assert re.findall(r"^tp\dof2 +(current|previous) ", output, re.M) == ["current", "previous"] * 2
    changed = re.findall(r"^(\S+) is served by every rank, instead of (\S+) \(", output, re.M)
    assert len(changed) == 2, output
    assert "no change is under way" in output


@pytest.mark.timeout(TIMEOUT_S)
def test_pushed_by_a_trainer_and_rolled_back(shell: Shell) -> None:
    (shell.directory / "trainer.py").write_text(blocks()["trainer.py"][1])
    output = shell.run(commands("publish"))
    found = re.search(r"^True True (pushed:[0-9a-f]{64})$", output, re.M)
    assert found, output
    assert re.findall(r"^tp0of1 +(\w+) +(\w+):", output, re.M)[0] == ("current", "pushed"), output
    assert re.search(rf"is served by every rank, instead of {found[1]} ", output)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_draft_beside_its_target(shell: Shell, tmp_path: Path) -> None:
    for file in ("draft.py", "merge.py"):
        (shell.directory / file).write_text(blocks()[file][1])
    shell.environment["DRAFT"] = str(make_checkpoint(tmp_path / "draft", nbytes=2 << 20).directory)
    output = shell.run(commands("several"), then='weightcached status; python merge.py "$MODEL"')
    assert re.search(r"^draft/host-tp0of1 +ready", output, re.M)
    assert re.search(r"^\[\[1, 2, 3(, \d+)+\]\]$", output, re.M)
    assert re.search(r"^[1-9]\d* parameters are this engine's own\n0 are, with the pages given back$", output, re.M)


@pytest.mark.timeout(TIMEOUT_S)
def test_a_plan_from_headers(shell: Shell) -> None:
    output = shell.run(commands("plan"))
    assert re.search(r"^model\.layers\.\*\.self_attn\.qkv_proj\.weight +\d+ +column ", output, re.M)
    (rank,) = json.loads((shell.directory / "plan.json").read_text())["ranks"]
    assert rank["rank"] == "tp1of2"


@pytest.mark.timeout(TIMEOUT_S)
def test_what_is_served_is_verified_against_disk(shell: Shell) -> None:
    output = shell.run(commands("verify"))
    assert re.search(r"^tp0of1 .* \d+ equal +\d+ equal$", output, re.M)
    assert "differs" not in output


@pytest.mark.timeout(TIMEOUT_S)
def test_a_cold_boot_from_a_snapshot(shell: Shell) -> None:
    output = shell.run(commands("snapshot"), then="weightcached status --name cold")
    assert len(re.findall("all digests right", output)) == 2
    for rank in (0, 1):
        assert re.search(rf"^cold/host-tp{rank}of2 +ready", output, re.M)
