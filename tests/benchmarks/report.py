"""Rendering: tables for a terminal, the same as markdown, and everything as JSON. Touches no measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.outcome import Outcome, Table, Target

_VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


def targets_table(targets: Iterable[Target]) -> Table:
    rows = tuple((target.text, target.found, _VERDICTS[target.met]) for target in targets)
    return Table("Targets", ("target", "found", ""), rows)


def text(table: Table) -> str:
    """For a terminal: columns padded, numbers to the right."""
    widths = [max(len(row[column]) for row in (table.columns, *table.rows)) for column in range(len(table.columns))]
    lines = [f"── {table.title} ──", _line(table.columns, widths), "  ".join("─" * width for width in widths)]
    lines += [_line(row, widths) for row in table.rows]
    lines += [f"  {note}" for note in table.notes]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if number == 0 or not _is_number(cell) else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "–")


def markdown(table: Table) -> str:
    lines = [f"### {table.title}", "", _markdown_line(table.columns), _markdown_line(["---"] * len(table.columns))]
    lines += [_markdown_line(row) for row in table.rows]
    lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines)


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write(folder: Path, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> tuple[Path, Path]:
    """Writes ``results.json`` and ``results.md`` into ``folder`` (made if need be). Returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / "results.json", folder / "results.md"
    whole = {"facts": facts, "benchmarks": [dataclasses.asdict(outcome) for outcome in outcomes]}
    as_json.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    tables = [table for outcome in outcomes for table in outcome.tables]
    targets = [target for outcome in outcomes for target in outcome.targets]
    parts = ["# Benchmarks", "\n".join(f"- {key}: {value}" for key, value in facts.items())]
    parts += [markdown(table) for table in (targets_table(targets), *tables)]
    as_markdown.write_text("\n\n".join(parts) + "\n")
    return as_json, as_markdown
