"""Rendering: tables for a terminal, the same as markdown, and everything as JSON. Touches no measurement."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.outcome import Outcome, Table, Target


def say(text: str) -> None:
    """Progress, for whoever watches; never part of the results."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


_VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


def targets_table(targets: Iterable[Target]) -> Table:
    rows = tuple((target.text, target.found, _VERDICTS[target.met]) for target in targets)
    return Table("Targets", ("target", "found", ""), rows)


def text(table: Table) -> str:
    """For a terminal: columns padded, columns of numbers to the right."""
    columns = [[row[number] for row in table.rows] for number in range(len(table.columns))]
    widths = [max(map(len, (head, *cells))) for head, cells in zip(table.columns, columns, strict=True)]
    right = [bool(cells) and all(_is_number(cell) for cell in cells) for cells in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("─" * width for width in widths)
    notes = [f"  {note}" for note in table.notes]
    return "\n".join([f"── {table.title} ──", line(table.columns), rule, *map(line, table.rows), *notes])


def _is_number(cell: str) -> bool:
    return cell == "" or (cell[0].isdigit() and not cell[-1].isalpha()) or cell.endswith((" GiB", " MiB"))


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
