"""Owns how the demo's measurements are laid out: groups of rows, right-aligned, as plain text for any log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """A titled group of rows. Every row has one cell per column; ``None`` prints as a dash."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, tuple[str | None, ...]]] = field(default_factory=list)

    def add(self, label: str, *cells: str | None) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append((label, cells))


def render(groups: Sequence[Group]) -> str:
    """All groups as one table: labels share a width, and each column too where groups have as many."""
    labels = [f"  {label}" for group in groups for label, _ in group.rows] + [group.title for group in groups]
    label_width = max(map(len, labels))
    number = max(len(group.columns) for group in groups)
    widths = [
        max(len(line[at]) for group in groups for line in _lines(group) if at < len(line)) for at in range(number)
    ]
    rule = "-" * (label_width + sum(width + 2 for width in widths))
    out = []
    for group in groups:
        out.append(rule)
        for label, cells in zip([group.title, *(f"  {label}" for label, _ in group.rows)], _lines(group), strict=True):
            numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
            out.append(f"{label:<{label_width}}{numbers}".rstrip())
    out.append(rule)
    return "\n".join(out)


def _lines(group: Group) -> list[tuple[str, ...]]:
    return [group.columns, *(tuple("-" if cell is None else cell for cell in cells) for _, cells in group.rows)]


def seconds(value: float) -> str:
    """Two decimals; three under a tenth of a second, so that milliseconds show."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def decimal_size(nbytes: int) -> str:
    """Decimal, as disks and safetensors count; megabytes below a tenth of a gigabyte."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
