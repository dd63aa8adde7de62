"""The example engine of `tests/example_engine`, installed for real, and checkpoints for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import raw_tensor, write_safetensors
from tests.support.unprivileged import ROOT

PACKAGE = ROOT / "tests" / "example_engine"
SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 64}


def install(target: Path) -> Path:
    """Build the package and install it into ``target``, which is what a ``PYTHONPATH`` may name then. No network."""
    source = target.parent / f"{target.name}-source"
    for path in PACKAGE.rglob("*"):  # a copy: builds leave files beside the sources
        if path.suffix in (".py", ".toml", ".md"):
            copy = source / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    return target


def environment(target: Path, **switches: str) -> dict[str, str]:
    """Of a process that finds what is installed in ``target``."""
    there = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{target}{os.pathsep + there if there else ''}", **switches}


def toy_model(directory: Path) -> Path:
    """A checkpoint of the example engine."""
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["ToyForCausalLM"], **SIZES}))
    shapes = {
        "embed.weight": (SIZES["vocab_size"], hidden),
        "up.weight": (inner, hidden),
        "down.weight": (hidden, inner),
    }
    write_safetensors(
        directory / "model.safetensors", {name: raw_tensor(name, shape, "F32") for name, shape in shapes.items()}
    )
    return directory
