"""What plans say of themselves: one JSON document for machines, tables for people. Pure. Used by ``weightcached plan``.

A rank's plan may have 100,000 parameters: for people, those that are alike but for the numbers in their names (layers,
experts) are counted as they come and shown as one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightcached.loader.accounting import Accounting
from weightcached.loader.boxes import Box, Shape, whole
from weightcached.loader.checkpoint import Checkpoint
from weightcached.loader.layout import Placed
from weightcached.loader.pipeline import Prepared
from weightcached.loader.planned import PlannedParameter
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.ranks import rank_word
from weightcached.protocol.text import binary_size, folded, one_line, table


@dataclass(slots=True)
class KindBytes:
    """Of the parameters that ranks share in one way. ``read_nbytes`` is the most that is asked of the files, gaps
    included; ``kept_nbytes`` is what of it becomes part of a parameter.
    """

    parameters: int = 0
    read_nbytes: int = 0
    kept_nbytes: int = 0
    resident_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's plan without its parameters."""

    config: CacheConfig
    segments_nbytes: tuple[int, ...]
    parameters: int
    accounting: Accounting
    kinds: Mapping[str, KindBytes]

    @property
    def rank(self) -> str:
        """``tp0of2``, with the ranks of other kinds where there are such."""
        return rank_word(self.config.parallel)


def summarize(prepared: Prepared) -> RankSummary:
    kinds: dict[str, KindBytes] = {
        kind: KindBytes(read_nbytes=nbytes) for kind, nbytes in sorted(prepared.requested.items())
    }
    for placed in prepared.placement.placed:
        parameter = placed.parameter
        row = kinds[parameter.part_kind]
        row.parameters += 1
        if parameter.alias_of is None:
            row.resident_nbytes += placed.nbytes
        if parameter.source_dtype is not None:
            elements = sum([copy.source.volume for copy in parameter.copies])
            row.kept_nbytes += elements * itemsize_bytes(parameter.source_dtype)
    plan, placement = prepared.plan, prepared.placement
    return RankSummary(plan.config, placement.segments_nbytes, len(plan.parameters), plan.accounting, kinds)


# For machines


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """What all ranks load from."""
    return {
        "model": str(checkpoint.directory),
        "tensors": len(checkpoint.tensors),
        "files": {name: os.fstat(fd).st_size for name, fd in checkpoint.files.items()},
        "ignored_files": dict(checkpoint.ignored_files),
    }


def rank_document(summary: RankSummary, prepared: Prepared) -> Iterator[str]:
    """One rank's JSON, in pieces: its config, the four name sets, bytes by kind of part, and each parameter with where
    it comes from.
    """
    accounting = summary.accounting
    head = {
        "rank": summary.rank,
        "config": {name: value for name, value in summary.config.model_dump().items() if name != "model"},
        "fingerprint": summary.config.fingerprint,
        "segments_nbytes": summary.segments_nbytes,
        "accounting": {
            "expected": sorted(accounting.expected),
            "loaded": sorted(accounting.loaded),
            "ignored": dict(sorted(accounting.ignored.items())),
            "unexpected": sorted(accounting.unexpected),
        },
        "kinds": {
            kind: {name: getattr(row, name) for name in KindBytes.__slots__} for kind, row in summary.kinds.items()
        },
    }
    yield json.dumps(head).removesuffix("}")
    yield ', "parameters": ['
    separator = ""
    for placed in prepared.placement.placed:
        yield separator + json.dumps(_parameter(placed))
        separator = ", "
    yield "]}"


def _parameter(placed: Placed) -> dict[str, Any]:
    parameter = placed.parameter
    return {
        "name": parameter.name,
        "shape": parameter.shape,
        "dtype": parameter.dtype,
        "source_dtype": parameter.source_dtype,
        "segment": placed.segment,
        "offset": placed.offset,
        "nbytes": placed.nbytes,
        "part_kind": parameter.part_kind,
        "alias_of": parameter.alias_of,
        "produced_by": parameter.produced_by,
        "copies": [
            {
                "tensor": copy.tensor.name,
                "file": copy.tensor.file,
                "source": _index(copy.source, copy.tensor.shape),
                "destination": _index(copy.destination, parameter.source_shape),
            }
            for copy in parameter.copies
        ],
        "zeros": [_index(box, parameter.source_shape) for box in parameter.zeros],
    }


def _index(box: Box, shape: Shape) -> str:
    """The box as an index: ``[0:512, :]``; ``[...]`` for all of it."""
    if box == whole(shape):
        return "[...]"
    axes = (
        ":" if (start, stop) == (0, extent) else f"{start}:{stop}"
        for start, stop, extent in zip(box.start, box.stop, shape, strict=True)
    )
    return f"[{', '.join(axes)}]"


# For people


def render(checkpoint: Mapping[str, Any], ranks: Sequence[RankSummary], shown: Prepared) -> list[str]:
    """The lines. ``checkpoint`` is its document; what goes where is that of ``shown``, one of the ranks."""
    config, files = shown.plan.config, checkpoint["files"]
    lines = [
        f"model       {checkpoint['model']}",
        f"checkpoint  {checkpoint['tensors']} tensors, {binary_size(sum(files.values()))}; files: {len(files)}",
        f"config      {config.architecture}, layout {config.layout} (revision {config.layout_revision}), "
        f"dtype {config.dtype}, quantization {config.quantization.spelled}",
        "",
        *_rank_table(ranks),
        "",
        *_kind_table(ranks),
        "",
        f"what goes where, rank {rank_word(config.parallel)}:",
        *table([("PARAMETER", "TIMES", "KIND", "SHAPE", "DTYPE", "FROM"), *_parameter_rows(shown)]),
    ]
    if left_out := list(_left_out(checkpoint, ranks)):
        lines += ["", "ignored:", *table([("WHAT", "TIMES", "WHY"), *left_out])]
    return [one_line(line) for line in lines]


def _rank_table(ranks: Sequence[RankSummary]) -> list[str]:
    heading = ("RANK", "PARAMETERS", "READ", "KEPT", "RESIDENT", "EXPECTED", "LOADED", "IGNORED", "UNEXPECTED")
    return table([heading, *(_rank_row(rank) for rank in ranks)])


def _rank_row(rank: RankSummary) -> tuple[str, ...]:
    kinds, accounting = rank.kinds.values(), rank.accounting
    sizes = (sum(row.read_nbytes for row in kinds), sum(row.kept_nbytes for row in kinds), sum(rank.segments_nbytes))
    names = (accounting.expected, accounting.loaded, accounting.ignored, accounting.unexpected)
    return (rank.rank, str(rank.parameters), *map(binary_size, sizes), *(str(len(some)) for some in names))


def _kind_table(ranks: Sequence[RankSummary]) -> list[str]:
    """Ranks whose figures are equal are one row for each kind."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        for kind, row in rank.kinds.items():
            sizes = map(binary_size, (row.read_nbytes, row.kept_nbytes, row.resident_nbytes))
            alike.setdefault((kind, str(row.parameters), *sizes), []).append(rank.rank)
    rows = sorted((kind, ", ".join(which), *figures) for (kind, *figures), which in alike.items())
    return table([("KIND", "RANKS", "PARAMETERS", "READ", "KEPT", "RESIDENT"), *rows])


def _parameter_rows(prepared: Prepared) -> Iterator[tuple[str, ...]]:
    times: Counter[tuple[Any, ...]] = Counter()
    first: dict[tuple[Any, ...], PlannedParameter] = {}
    for parameter in prepared.plan.parameters:
        form = _form(parameter)
        times[form] += 1
        first.setdefault(form, parameter)
    for form, parameter in first.items():
        source, stored = parameter.source_dtype, parameter.dtype
        yield (
            folded(parameter.name),
            str(times[form]),
            parameter.part_kind,
            "×".join(map(str, parameter.shape)) or "scalar",
            stored if source in (None, stored) else f"{source} → {stored}",
            _origin(parameter),
        )


def _form(parameter: PlannedParameter) -> tuple[Any, ...]:
    """What parameters that are shown as one have in common."""
    copies = [(folded(copy.tensor.name), copy.source, copy.tensor.shape) for copy in parameter.copies]
    return (folded(parameter.name), parameter.shape, parameter.dtype, *copies, parameter.zeros)


def _origin(parameter: PlannedParameter) -> str:
    """Where its bytes come from. Tensors are named from where their name parts from the parameter's."""
    name = folded(parameter.name)
    for target, what in ((parameter.alias_of, "the same as"), (parameter.produced_by, "made with")):
        if target is not None:
            return f"{what} {folded(target)}"
    parts = [
        _after(folded(copy.tensor.name), name) + _index(copy.source, copy.tensor.shape).removeprefix("[...]")
        for copy in parameter.copies
    ]
    parts += [f"zeros {_index(box, parameter.source_shape)}" for box in parameter.zeros]
    return _repeated(parts) or "nothing"


def _repeated(parts: Sequence[str]) -> str:
    """``a + b``; ``(a + b) × 8`` where that stands eight times, as experts do."""
    for period in range(1, len(parts) // 2 + 1):
        times, left = divmod(len(parts), period)
        if not left and list(parts) == list(parts[:period]) * times:
            return f"({' + '.join(parts[:period])}) × {times}"
    return " + ".join(parts)


def _after(tensor: str, parameter: str) -> str:
    """``q_proj.weight`` for ``a.q_proj.weight`` beside ``a.qkv_proj.weight``; the whole name where it is the same."""
    components, others = tensor.split("."), parameter.split(".")
    shared = next((n for n, (a, b) in enumerate(zip(components, others, strict=False)) if a != b), 0)
    return ".".join(components[shared:])


def _left_out(checkpoint: Mapping[str, Any], ranks: Sequence[RankSummary]) -> Iterator[tuple[str, str, str]]:
    """Tensors that none of the ranks reads, and files: those alike but for numbers are one row."""
    loaded = frozenset[str]().union(*(rank.accounting.loaded for rank in ranks))
    ignored = (item for rank in ranks for item in rank.accounting.ignored.items())
    reasons = {name: reason for name, reason in ignored if name not in loaded}
    times = Counter((folded(name), reason) for name, reason in sorted(reasons.items()))
    yield from ((name, str(count), reason) for (name, reason), count in times.items())
    yield from ((name, "1", reason) for name, reason in checkpoint["ignored_files"].items())
