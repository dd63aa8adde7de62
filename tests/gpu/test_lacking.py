"""What a machine with a GPU lacks is named with what to do, what was brought is used, and the rest is not needed."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.gpu import carry, check
from tests.gpu.test_check import CHECK, checked

ONLY = """
import importlib.metadata as metadata, re, sys

def closure(names):
    found, left = set(), list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in found:
            try:
                needed = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            found.add(name)
            left += [re.match(r"[\\w.-]+", one)[0] for one in needed if "extra ==" not in one]
    return found

class Only:
    allowed = closure({names})
    of = metadata.packages_distributions()

    def find_spec(self, name, path=None, target=None):
        owners = self.of.get(name.partition(".")[0], ())
        if owners and not any(owner.lower().replace("_", "-") in self.allowed | {{"weightcached"}} for owner in owners):
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden)", name=name)

sys.meta_path.insert(0, Only())
"""


def said(folder: Path, **variables: str) -> tuple[int, dict[str, str]]:
    """The command's (exit status, {package: what is wrong}) where what lies in ``folder`` is found first."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    command = [sys.executable, str(CHECK), "--row", "map"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode, dict(line.split(": ", 1) for line in ended.stderr.splitlines()[1:] if ": " in line)


def installed(folder: Path, package: str, version: str, requires: str = "") -> None:
    """As pip would leave it, as far as anybody asks whether it is there."""
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}")


def wheel(folder: Path, package: str, version: str, module: str) -> None:
    """A package of one module, which says its version."""
    folder.mkdir(exist_ok=True)
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_where_nothing_is_installed_all_of_it_is_named_but_what_the_checkout_carries(tmp_path):
    ended = subprocess.run([sys.executable, "-S", str(CHECK)], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    named = [line.split(": ")[0] for line in ended.stderr.splitlines()[1:]]
    assert named == [*check.EXPECTED.values()]
    assert "pip install 'cuda-bindings>=13'" in ended.stderr
    assert "pip install 'numpy';" in ended.stderr
    assert ended.stdout == ""


def test_what_is_too_old_is_named_with_both_versions(tmp_path):
    installed(tmp_path, "cuda_bindings", "12.9.1")
    installed(tmp_path, "msgpack", "1.2.3")  # is brought
    installed(tmp_path, "torch", "2.3.1")
    status, wrong = said(tmp_path, FAKECUDA="no device is asked for")
    assert status == 2
    assert wrong.keys() == {"cuda-bindings", "torch"}
    assert wrong["cuda-bindings"].startswith("12.9.1 is installed, and 13 or newer is needed. pip install ")
    assert re.search(r"`python tests/gpu/carry.py --python-version 3\.\d+ .* 'torch>=2\.4'` ", wrong["torch"])


def test_torch_without_cuda_will_not_do_but_in_a_rehearsal(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__, cuda = '2.11.0+cpu', None\n")
    installed(tmp_path, "torch", "2.11.0+cpu")
    environment = {name: value for name, value in os.environ.items() if name != "FAKECUDA"}
    ended = subprocess.run(
        [sys.executable, str(CHECK)],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[1].startswith("torch: this build (2.11.0+cpu) has no CUDA. Install one that has")
    assert len(ended.stderr.splitlines()) == 2


def test_what_was_brought_is_used_and_what_was_not_is_named(tmp_path, monkeypatch, capfd):
    """Also in place of something that is too old; and a wheel that is broken is no package."""
    monkeypatch.setattr(check, "WHEELHOUSE", tmp_path / "wheelhouse")
    monkeypatch.setattr(check, "lacking", lambda: {"tqdm": "not installed", "python-json-logger": "not installed"})
    started = []
    run = subprocess.run

    def look(command, **options):
        if "tests.gpu.runner" not in command:
            return run(command, **options)
        program = "import tqdm, pythonjsonlogger as other; print(tqdm.version, other.version)"
        started.append(run([sys.executable, "-c", program], capture_output=True, text=True, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "run", look)
    wheel(tmp_path / "wheelhouse", "tqdm", "99.1", "tqdm")
    assert check.main([]) == 2
    assert capfd.readouterr().err.splitlines() == [*("The check cannot run here:", "python-json-logger: not installed")]
    wheel(tmp_path / "wheelhouse", "python_json_logger", "99.2", "pythonjsonlogger")
    assert check.main([]) == 0
    assert [one.stdout for one in started] == ["99.1 99.2\n"]
    (tmp_path / "wheelhouse" / "tqdm-99.1-py3-none-any.whl").write_bytes(b"half of it")
    assert check.main([]) == 2
    assert "cannot unpack tqdm, python-json-logger from" in capfd.readouterr().err


def test_what_is_to_be_carried_is_what_is_fetched_and_more_by_name(monkeypatch):
    commands = []

    def fetch(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    def fail(command):
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fetch)
    assert carry.main(other := ["--python-version", "3.14", "uvloop"]) == 0
    assert carry.main([]) == 0
    fetched = [command[command.index(f"--dest={check.WHEELHOUSE}") + 1 :] for command in commands]
    each = [[f"--python-version={python}", f"--platform={carry.PLATFORM}"] for python in carry.PYTHONS]
    assert fetched == [[*options, *check.CARRIED.values()] for options in [other, *each]]
    monkeypatch.setattr(subprocess, "run", fail)
    assert carry.main([]) == 3


def test_the_checkout_has_a_wheel_of_each_carried_package_for_each_python_and_no_other(tmp_path):
    """As pip finds them for such a machine, with all that they need; it may be older than this one. They stay few."""
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    wanted = [one for one in project["dependencies"] if re.match(r"[\w-]+", one)[0] in check.CARRIED.values()]  # type: ignore[index]
    for python in carry.PYTHONS:
        machine = ["--only-binary=:all:", f"--python-version={python}", f"--platform={carry.PLATFORM}"]
        assert check.of_wheelhouse("download", *machine, f"--dest={tmp_path / python}", *wanted), python
    there = {path.name: path.stat().st_size for path in check.WHEELHOUSE.iterdir()}
    assert {path.name for path in tmp_path.glob("*/*.whl")} == there.keys()
    assert sum(there.values()) < 12_000_000


@pytest.mark.skipif(
    f"{sys.version_info.major}.{sys.version_info.minor}" not in carry.PYTHONS or platform.machine() != "x86_64",
    reason="the checkout carries nothing for this Python or this processor",
)
def test_what_the_checkout_carries_is_unpacked_and_imported_in_place_of_what_is_installed(tmp_path, monkeypatch, capfd):
    """What is installed may want other versions; it is not disturbed, and pip need not say so."""
    with monkeypatch.context() as patched:
        installed(tmp_path / "there", "needy", "1", "Requires-Dist: xxhash==1\n")
        patched.setenv("PYTHONPATH", str(tmp_path / "there"))
        assert check.unpacked([*check.CARRIED.values()], tmp_path)
    assert capfd.readouterr().err == ""
    program = "import importlib, sys; print(*(importlib.import_module(n).__file__ for n in sys.argv[1:]), sep='\\n')"
    modules = [*check.CARRIED, "pydantic_core"]  # of just the version that pydantic wants
    command = [sys.executable, "-P", "-c", program, *modules]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [Path(one).relative_to(tmp_path).parts[0] for one in ended.stdout.splitlines()] == modules


def test_what_the_project_depends_on_is_expected_carried_or_not_needed_here():
    """A new dependency has to be put in one of them, or to be found unnecessary below."""
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w-]+", one)[0] for one in [*project["dependencies"], "cuda-bindings"]}  # type: ignore[index]
    listed = {*check.EXPECTED.values(), *check.CARRIED.values()}
    assert required - listed == {"huggingface_hub", "pyzmq"}
    assert listed <= required


@pytest.mark.slow
def test_nothing_but_what_is_expected_and_carried_is_needed(fake_cuda, tmp_path):
    """Everything else is hidden from every process: for models of a hub, the control plane, engines, tests. And files
    may lie where no socket could, its path being too long.
    """
    names = {*check.EXPECTED.values(), *check.CARRIED.values()}
    (tmp_path / "sitecustomize.py").write_text(ONLY.format(names=names))
    variables = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import zmq"]
    assert b"hidden" in subprocess.run(command, env={**os.environ, **variables}, capture_output=True).stderr
    (somewhere := tmp_path / ("far" * 40)).mkdir()
    status, verdicts, written = checked(fake_cuda, "--row", "vault", "--folder", str(somewhere), **variables)
    assert status == 0, written
    assert verdicts["vault"][0] == "PASS"
