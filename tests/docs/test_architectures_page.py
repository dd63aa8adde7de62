"""The page on adding an architecture shows a table and a test that work as they stand, added as it says."""

import re
from typing import Any

import pytest

from tests.support.unprivileged import ROOT
from weightcached.loader.architectures import ARCHITECTURES

PAGE = ROOT / "loader/architectures/README.md"
BLOCK = re.compile(r"^<!-- example: (?P<name>\w+) -->\n```python\n(?P<text>.*?)^```$", re.M | re.S)
BLOCKS = {found["name"]: found["text"] for found in BLOCK.finditer(PAGE.read_text())}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("use_bias", [True, False])
def test_the_page_s_test_passes_with_the_page_s_table(monkeypatch, tmp_path, size, use_bias):
    table: dict[str, Any] = {"__name__": "table"}
    test: dict[str, Any] = {"__name__": "test"}
    exec(compile(BLOCKS["table"], PAGE, "exec"), table)
    exec(compile(BLOCKS["test"], PAGE, "exec"), test)
    monkeypatch.setitem(ARCHITECTURES, "Starcoder2ForCausalLM", table["STARCODER2"])
    test["test_every_rank_of_starcoder2"](tmp_path, size, use_bias)


def test_what_the_page_links_to_is_there():
    links = re.findall(r"\]\((?P<path>[\w.]+)\)", PAGE.read_text())
    assert links
    assert all((PAGE.parent / path).is_file() for path in links)


def test_the_readme_links_to_the_page():
    assert "loader/architectures/README.md" in (ROOT / "README.md").read_text()
