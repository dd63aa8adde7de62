"""(c) Reads: bytes that one rank of eight asks the kernel for, and that the kernel gets from the disk, over bytes kept.

The shapes are those of a hidden size of 8192. Asked for is the pipeline's own account; got from the disk is what is in
the page cache after a load that began with none of it there, seen from outside, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.benchmarks import checkpoints, fresh
from tests.benchmarks.checkpoints import Written
from tests.benchmarks.machine import require_memory
from tests.benchmarks.outcome import GIB, Outcome, Settings, Table, Target, ratio, size
from tests.benchmarks.page_cache import PAGE_BYTES, make_cold, resident_pages
from tests.benchmarks.workspace import Workspace

TP_SIZE = 8
KINDS = ("column", "vocabulary", "replicated", "row")
_KIND_OF_PROJECTION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column"),
    **dict.fromkeys(("o_proj", "down_proj"), "row"),
    **dict.fromkeys(("embed_tokens", "lm_head"), "vocabulary"),
}


@dataclass(frozen=True)
class RankReads:
    """One rank's load. All by part kind, in bytes, but the last two, which are the kernel's counts of the process."""

    rank: int
    kept: Mapping[str, int]
    asked: Mapping[str, int]
    from_disk: Mapping[str, int]
    process_rchar: int
    process_read_bytes: int


def run(settings: Settings, workspace: Workspace) -> Outcome:
    require_memory(2 * GIB, what="reads")
    inner, vocabulary = (2048, 2048) if settings.quick else (8192, 8192)
    written = checkpoints.wide_decoder(workspace.directory / "reads", layers=1, inner=inner, vocabulary=vocabulary)
    ranks = (0, 7) if settings.quick else range(TP_SIZE)
    alone = [_cold(workspace, written, rank) for rank in ranks]
    make_cold(written.files)
    together = [_load(workspace, written, rank) for rank in range(TP_SIZE)]
    whole_host = _from_disk(written)
    workspace.remove(written.directory)
    figures = {
        "each_rank_cold": [asdict(one) for one in alone],
        "all_ranks_of_a_host": [asdict(one) for one in together],
        "from_disk_for_all_ranks": whole_host,
        "nbytes": written.nbytes,
    }
    tables = [_table(alone, written, inner), _host_table(together, whole_host, written)]
    return Outcome("reads", tables, list(_targets(alone, whole_host, written)), figures)


def _cold(workspace: Workspace, written: Written, rank: int) -> RankReads:
    make_cold(written.files)
    return _load(workspace, written, rank)


def _load(workspace: Workspace, written: Written, rank: int) -> RankReads:
    before = _from_disk(written)
    answer = fresh.call(
        workspace, "measured.reading:rank", directory=str(written.directory), tp_size=TP_SIZE, tp_rank=rank
    ).value
    after = _from_disk(written)
    return RankReads(
        rank=rank,
        kept=answer["kept"],
        asked=answer["asked"],
        from_disk={kind: after[kind] - before[kind] for kind in KINDS},
        process_rchar=answer["rchar"],
        process_read_bytes=answer["read_bytes"],
    )


def _from_disk(written: Written) -> dict[str, int]:
    """Bytes of each kind's tensors whose pages are in the page cache. A page that two share counts for both."""
    nbytes = dict.fromkeys(KINDS, 0)
    pages = {path.name: resident_pages(path) for path in written.files}
    for place in written.places:
        first, end = place.offset // PAGE_BYTES, -(-(place.offset + place.tensor.nbytes) // PAGE_BYTES)
        nbytes[_kind(place.tensor.name)] += sum(pages[place.file][first:end]) * PAGE_BYTES
    return nbytes


def _kind(name: str) -> str:
    return next((kind for part, kind in _KIND_OF_PROJECTION.items() if f".{part}." in f".{name}"), "replicated")


def _worst(loads: Sequence[RankReads], figure: str, kind: str) -> float:
    """Of all ranks: the most bytes for each byte kept."""
    return max(getattr(one, figure)[kind] / one.kept[kind] for one in loads)


def _table(alone: Sequence[RankReads], written: Written, inner: int) -> Table:
    rows = [
        (
            kind,
            size(max(one.kept[kind] for one in alone)),
            ratio(_worst(alone, "asked", kind), 1.0),
            ratio(_worst(alone, "from_disk", kind), 1.0),
        )
        for kind in KINDS
    ]
    process = max(one.process_read_bytes / sum(one.kept.values()) for one in alone)
    rows.append(("all, by the kernel's count", "", "", ratio(process, 1.0)))
    pieces = {"o_proj": 8192 // TP_SIZE * 2, "down_proj": inner // TP_SIZE * 2}
    return Table(
        f"Reads: one rank of TP {TP_SIZE}, hidden 8192, nothing in the page cache (the worst of {len(alone)} ranks)",
        ("parts", "kept", "asked for / kept", "from disk / kept"),
        tuple(rows),
        (
            f"row-parallel pieces are {', '.join(f'{name} {nbytes} bytes' for name, nbytes in pieces.items())}",
            "from disk: pages in the page cache afterwards, so the kernel's own read-ahead is in it, and each tensor's "
            "ends are rounded to pages (replicated norms are four pages each)",
            f"checkpoint: {size(written.nbytes)}",
        ),
    )


def _host_table(together: Sequence[RankReads], whole_host: Mapping[str, int], written: Written) -> Table:
    on_disk = _on_disk(written)
    rows = [
        (
            kind,
            size(on_disk[kind]),
            ratio(sum(one.asked[kind] for one in together), on_disk[kind]),
            ratio(whole_host[kind], on_disk[kind]),
        )
        for kind in KINDS
    ]
    return Table(
        f"Reads: all {TP_SIZE} ranks of one host, one after the other",
        ("parts", "on disk", "asked for / on disk", "from disk / on disk"),
        tuple(rows),
        ("at most 1 from disk: what one rank had read, the others found in the page cache",),
    )


def _on_disk(written: Written) -> dict[str, int]:
    nbytes = dict.fromkeys(KINDS, 0)
    for place in written.places:
        nbytes[_kind(place.tensor.name)] += place.tensor.nbytes
    return nbytes


def _targets(alone: Sequence[RankReads], whole_host: Mapping[str, int], written: Written) -> Iterator[Target]:
    kinds = ("column", "vocabulary", "replicated")
    asked = {kind: _worst(alone, "asked", kind) for kind in kinds}
    words = ", ".join(f"{kind} {value:.3f}" for kind, value in asked.items())
    yield Target(
        "reads: asked for at most 1.1 of kept (column, vocabulary, replicated)", words, max(asked.values()) <= 1.1
    )
    disk = max(sum(one.from_disk[kind] for kind in kinds) / sum(one.kept[kind] for kind in kinds) for one in alone)
    yield Target("reads: from disk at most 1.1 of kept (these parts together)", f"{disk:.3f}", disk <= 1.1)
    rows = whole_host["row"] / _on_disk(written)["row"]
    slack = 16 * PAGE_BYTES / _on_disk(written)["row"]
    yield Target("reads: row-parallel parts from disk at most once per host", f"{rows:.3f}", rows <= 1.0 + slack)
