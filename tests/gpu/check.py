"""Everything that this project claims about a GPU, tried on one: ``python tests/gpu/check.py``, in under five minutes.

Owns finding what the checks need. Of what a machine with a GPU usually has (torch with CUDA, numpy, safetensors,
msgpack, pydantic, uvloop, prometheus-client, cuda-bindings) nothing is installed; what is missing beside it is unpacked
from tests/gpu/wheelhouse/ (made by carry.py, where there is a network) into a folder that goes away again. Imports
nothing but the standard library, then hands over to ``runner.py``, which says what the options are.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELHOUSE = ROOT / "tests" / "gpu" / "wheelhouse"
CARRIED = {
    "blake3": "blake3",
    "pythonjsonlogger": "python-json-logger",
    "tqdm": "tqdm",
    "xxhash": "xxhash",
}
"""Module → package: what such a machine may lack."""
EXPECTED = {
    "cuda.bindings": "cuda-bindings",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "uvloop": "uvloop",
}
"""The same for what it should have."""


def main(arguments: list[str]) -> int:
    """Run the checks. Returns their status: 0 when nothing failed, 1 when something did, 2 when they could not run."""
    lacking = [package for module, package in EXPECTED.items() if not _there(module)]
    missing = [package for module, package in CARRIED.items() if not _there(module)]
    if lacking:
        print(f"needs packages that are not here: {', '.join(lacking)}: pip install them", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="weightcached-carried-") as folder:
        if missing:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            if subprocess.run([*install, f"--find-links={WHEELHOUSE}", f"--target={folder}", *missing]).returncode:
                print(f"not here, nor in {WHEELHOUSE} (see carry.py): {', '.join(missing)}", file=sys.stderr)
                return 2
        _say_version(Path(folder))
        # `.typing` shows the folders of this checkout as the packages that they are: nothing has to be installed.
        paths = [str(ROOT), str(ROOT / ".typing"), folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, "-P", "-m", "tests.gpu.runner", *arguments], env=environment).returncode


def _say_version(folder: Path) -> None:
    """What an installation would have left: daemons and engines tell each other their version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"weightcached-{project['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: weightcached\nVersion: {project['version']}\n")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
