"""The house rules that no single module can keep: what is packaged, who may import whom, what every file must have."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("client", "daemon", "loader", "protocol", "systemd")

# What a room may import of the other rooms. The client's one import of the loader, for the disk fallback, is late.
ALLOWED = {
    "protocol": {"protocol"},
    "loader": {"loader", "protocol"},
    "daemon": {"daemon", "protocol"},
    "client": {"client", "loader", "protocol"},
    "systemd": set(),
}
HEAVY = {"numpy", "torch", "transformers"}
EXECUTABLE_ENCODINGS = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}

MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
IMPORTABLE = [path for path in MODULES if path.name != "__main__.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return "weightcached." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere in a module, in functions too; `from a import b` gives `a.b` (maybe a module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def imports_at_load(tree: ast.Module) -> Iterator[str]:
    """Dotted names imported by importing the module: not those in functions or under `if TYPE_CHECKING`."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_of(node)
        else:
            todo.extend(ast.iter_child_nodes(node))


def room_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "weightcached" and len(parts) > 1 else None


def tracked_files() -> list[Path]:
    """Files that git tracks or would track. Skips the test where there is no repository (an unpacked sdist)."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_package_table_lists_exactly_the_folders_with_modules() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"weightcached." + name_of(path.parent).replace("/", "."): name_of(path.parent) for path in MODULES}
    assert setuptools["package-dir"] == folders
    assert sorted(setuptools["packages"]) == sorted(folders)


def test_the_systemd_files_are_packaged() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [*package_data["*"], *package_data["weightcached.systemd"], "*.py"]
    left_out = [
        path.name
        for path in (ROOT / "systemd").iterdir()
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert left_out == []


def test_every_folder_at_the_top_with_modules_is_a_room_or_tests() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in tracked_files() if path.suffix == ".py"}
    assert tops == {*ROOMS, "tests"}


def test_weightcached_itself_is_a_namespace() -> None:
    package = importlib.import_module("weightcached")
    assert getattr(package, "__file__", None) is None


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_from_its_folder_and_ships_type_hints(room: str) -> None:
    module = importlib.import_module(f"weightcached.{room}")
    assert Path(str(module.__file__)).resolve() == ROOT / room / "__init__.py"
    assert (ROOT / room / "py.typed").is_file()


@pytest.mark.parametrize("room", ROOMS)
def test_type_checkers_see_the_room(room: str) -> None:
    link = ROOT / ".typing" / "weightcached" / room
    assert not os.path.isabs(os.readlink(link))
    assert link.resolve(strict=True) == ROOT / room


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    tree = ast.parse(path.read_text())
    room = path.relative_to(ROOT).parts[0]
    imported = set(imports_of(tree))
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)), "relative import"
    assert {other for name in imported if (other := room_of(name))} <= ALLOWED[room]
    tops = {name.split(".")[0] for name in imported}
    assert not tops & EXECUTABLE_ENCODINGS
    if room in ("protocol", "daemon"):
        assert not tops & HEAVY


@pytest.mark.parametrize("path", [p for p in MODULES if p.is_relative_to(ROOT / "client")], ids=name_of)
def test_the_client_imports_the_loader_late(path: Path) -> None:
    assert "loader" not in {room_of(name) for name in imports_at_load(ast.parse(path.read_text()))}


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([module_of(p) for p in IMPORTABLE if p.is_relative_to(ROOT / "protocol")], id="protocol"),
        pytest.param([module_of(p) for p in IMPORTABLE if p.is_relative_to(ROOT / "daemon")], id="daemon"),
        pytest.param(["weightcached.client"], id="client"),
    ],
)
def test_importing_brings_in_neither_torch_nor_numpy(modules: list[str]) -> None:
    """In a process of its own, because this one has imported them long ago. Catches what a dependency brings in."""
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program, *modules], check=True, capture_output=True, text=True)
    assert HEAVY & set(result.stdout.split()) == set()


def test_no_file_names_a_developers_machine() -> None:
    # Written in pieces, so that this file does not find itself.
    private = re.compile("/" + r"(work|root)/\w|/" + r"home/(?!user\b)\w+/|/tmp/" + "brief")
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name_of(path)}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if private.search(line)
        ]
    assert found == []
