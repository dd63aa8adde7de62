"""Everything that this project claims about a GPU, tried on one: ``python tests/gpu/check.py``, in under five minutes.

Owns finding what the checks need. What a machine with a GPU usually has is expected to be there, and nothing is
installed: what is missing beside it, or older than the project asks for, is unpacked from tests/gpu/wheelhouse/ (which
carry.py fills, where there is a network) into a folder that goes away again. Imports nothing but the standard library,
then hands over to ``runner.py``, which says what the options are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELHOUSE = ROOT / "tests" / "gpu" / "wheelhouse"
CARRIED = {
    "blake3": "blake3",
    "msgpack": "msgpack",
    "pydantic": "pydantic",
    "pythonjsonlogger": "python-json-logger",
    "tqdm": "tqdm",
    "xxhash": "xxhash",
}
"""Module → package: what such a machine may lack, or have too old. Their wheels are part of the checkout, with those
of what they need themselves.
"""
EXPECTED = {
    "cuda.bindings": "cuda-bindings",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "safetensors": "safetensors",
    "torch": "torch",
    "uvloop": "uvloop",
}
"""The same for what it should have."""
FETCH = " ".join(
    [
        f"python tests/gpu/carry.py --python-version {sys.version_info.major}.{sys.version_info.minor}",
        *(f"--platform manylinux_2_{glibc}_{platform.machine()}" for glibc in (17, 28)),
    ]
)
"""What fetches wheels for this machine, on another."""


def main(arguments: list[str]) -> int:
    """Run the checks. Returns their status: 0 when nothing failed, 1 when something did, 2 when they could not run."""
    wrong = lacking()
    brought = [package for package in wrong if wheels(package)]
    if without_help := [f"{package}: {why}" for package, why in wrong.items() if package not in brought]:
        print("\n".join(["The check cannot run here:", *without_help]), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="weightcached-carried-") as folder:
        if brought and not unpacked(brought, Path(folder)):
            said = f"cannot unpack {', '.join(brought)} from {WHEELHOUSE}, for the reason that pip gave"
            print(f"{said}. Where there is a network: `{FETCH}`; and bring that folder along", file=sys.stderr)
            return 2
        _say_version(Path(folder))
        # `.typing` shows the folders of this checkout as the packages that they are: nothing has to be installed.
        paths = [str(ROOT), str(ROOT / ".typing"), folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, "-P", "-m", "tests.gpu.runner", *arguments], env=environment).returncode


def lacking() -> dict[str, str]:
    """Package → what is wrong with it here, and what to do."""
    least = _least_versions()
    found = {}
    for module, package in (EXPECTED | CARRIED).items():
        wanted = f"{package}>={least[package]}" if least[package] else package
        fetch = f"{FETCH} '{wanted}'" if package in EXPECTED else FETCH
        bring = f"pip install '{wanted}'; or `{fetch}` where there is a network, and bring tests/gpu/wheelhouse/ along"
        if not _there(module):
            found[package] = f"not installed. {bring}"
        elif _version(package) < _numbers(least[package]):
            has = importlib.metadata.version(package)
            found[package] = f"{has} is installed, and {least[package]} or newer is needed. {bring}"
    # A rehearsal (FAKECUDA, tests/fakecuda/README.md) is made to do without.
    if "torch" not in found and "FAKECUDA" not in os.environ and _torch()["cuda"] is None:
        found["torch"] = (
            f"this build ({_torch()['__version__']}) has no CUDA. Install one that has: https://pytorch.org/get-started"
            "; tests/gpu/probe.py needs no torch"
        )
    return found


def wheels(package: str) -> list[Path]:
    """Those of ``package`` that were brought."""
    return list(WHEELHOUSE.glob(f"{re.sub('[-.]', '_', package)}-*.whl"))


def unpacked(packages: list[str], folder: Path) -> bool:
    """Whether they lie in ``folder`` now, with what they need: each fits the others, whatever is installed. pip knows
    which wheel is for this machine, and says so where none is.
    """
    return of_wheelhouse("install", "--no-compile", "--no-warn-conflicts", f"--target={folder}", *packages)


def of_wheelhouse(command: str, *arguments: str) -> bool:
    """Whether pip could do it with these wheels alone, however this machine's pip is configured."""
    pip = [sys.executable, "-m", "pip", command, "--isolated", "--quiet", "--no-index"]
    alone = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    return not subprocess.run([*pip, f"--find-links={WHEELHOUSE}", *arguments], env=alone).returncode


def _least_versions() -> dict[str, str]:
    """Package → the oldest version that the project's own requirements allow, or nothing where any will do."""
    project = _project()
    required = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    split = (re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", requirement) for requirement in required)
    return {one[1]: one[2] or "" for one in split if one}


def _version(package: str) -> tuple[int, ...]:
    return _numbers(importlib.metadata.version(package))


def _numbers(version: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` → (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # type: ignore[index]


def _torch() -> dict[str, Any]:
    """What torch's build says of itself. Importing torch for that takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _say_version(folder: Path) -> None:
    """What an installation would have left: daemons and engines tell each other their version."""
    version = _project()["version"]
    metadata = folder / f"weightcached-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: weightcached\nVersion: {version}\n")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
