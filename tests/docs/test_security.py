"""SECURITY.md says which test shows each claim: all of them are there, and so is every fuzz test in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
REFERENCES = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def defined(path: Path) -> set[str]:
    """Names of the functions in a file, those in classes included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_test_that_is_named_is_there() -> None:
    assert len(REFERENCES) > 50
    missing = [f"{path}::{name}" for path, name in REFERENCES if name not in defined(ROOT / path)]
    assert not missing


def test_every_mention_of_a_test_is_a_reference() -> None:
    mentioned = set(re.findall(r"\btest_\w+\b(?!\.py)", TEXT))
    assert mentioned == {name for _, name in REFERENCES}


def test_every_file_of_fuzz_tests_is_named() -> None:
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/test_fuzz_*.py")}
    assert files == {path for path, _ in REFERENCES if "/test_fuzz_" in path}
