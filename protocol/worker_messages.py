"""What the keeper and its worker say to each other, over a socket pair that the worker inherits.

The order is fixed: ``Job`` → ``Planned`` → ``Memory`` (with the segments' descriptors) → ``Progress``… → ``Done`` (with
the manifest's descriptor), or ``Failed`` at any point. Same framing as the data plane, other dialects.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from weightcached.protocol.messages import (
    BUCKETS_MAX,
    DAEMON_BODY_MAX_BYTES,
    GRANT_SEGMENTS_MAX,
    AccountingCounts,
    Count,
    Dialect,
    Hex32,
    Hex64,
    LongText,
    Message,
    Seconds,
    ShortText,
)

JOB_BODY_MAX_BYTES = 32 * 1024 * 1024


LoadStrategy = Literal["auto", "read", "prefetch", "direct", "gds", "mmap"]
"""How bytes get from files into segments; what each is for is the loader's to say."""


class Push(Message):
    """The weights come from a trainer. Of the job's descriptors the first is the socket to it, the second the manifest
    of the generation that is served; with ``partial`` its segments follow, of which is taken what is not pushed.
    """

    partial: bool
    bucket_nbytes: Count
    bucket_count: Count


class Job(Message):
    """Load this. ``config`` is a whole CacheConfig as plain values (``CacheConfig.model_dump()``)."""

    model_dir: LongText
    config: dict[str, JsonValue]
    generation: Hex32
    keeper_pid: Count
    trusted_filesystems: Annotated[tuple[ShortText, ...], Field(strict=False)] = ()
    """What the operator trusts beside the known ones: ``also_trusted`` of ``take_receipts``."""
    snapshot: LongText | None = None
    """The directory of a snapshot to fill the segments from, instead of from the weights in ``model_dir``."""
    strategy: LoadStrategy = "auto"
    engine_arguments: Annotated[tuple[LongText, ...], Field(strict=False)] = ()
    """Of the engine that ``config`` names as the maker of its layout, where there is one."""
    push: Push | None = None
    """Fill the segments with what a trainer pushes: of the checkpoint only the headers are read."""


class Planned(Message):
    """Headers read, plan proven. Nothing is allocated yet: the keeper decides whether there is room."""

    segments_nbytes: Annotated[tuple[Count, ...], Field(strict=False, min_length=1, max_length=GRANT_SEGMENTS_MAX)]
    bytes_to_read: Count
    receipts: Hex64 | None
    """``None`` where a snapshot is loaded and the checkpoint's weights are not there to be seen."""
    receipts_trusted: bool
    receipts_young: bool
    """Changed less than two seconds ago: not to be remembered."""
    receipts_rule: LongText = ""
    """Which rule decided whether they are trusted."""
    accounting: AccountingCounts
    digest: Hex64 | None = None
    """The content that a snapshot was made from."""


class Memory(Message):
    """Carries one writable descriptor per segment (its blank card, where the memory is the worker's to allocate), and
    for a push a readable one per bucket after them. ``version`` and ``receipts_version`` go into the manifest, unless a
    trainer assigns others.
    """

    version: ShortText
    receipts_version: ShortText
    digest: Hex64 | None


class Progress(Message):
    """How far a stage is."""

    stage: ShortText
    bytes_done: Count
    bytes_total: Count


class Done(Message):
    """Every segment is filled, and unmapped where it was mapped; carries the sealed manifest's descriptor.

    A worker whose own memory the segments are stays then, as their holder, until the keeper closes the connection.
    """

    manifest_nbytes: Count
    resident_nbytes: Count
    bytes_read: Count
    bytes_kept: Count
    """What became part of a parameter."""
    seconds: dict[str, Seconds]
    assigned_version: ShortText | None = None
    """Of a push."""


class Failed(Message):
    """The load failed. ``code`` is a code of the error tree; ``transient`` means that trying again may help."""

    code: ShortText
    message: LongText
    expected: LongText | None = None
    found: LongText | None = None
    where: LongText | None = None
    next_step: LongText | None = None
    transient: bool = False


KEEPER_TO_WORKER = Dialect(
    "keeper to worker",
    {1: Job, 2: Memory},
    body_max_bytes=JOB_BODY_MAX_BYTES,
    fds_max=GRANT_SEGMENTS_MAX + BUCKETS_MAX,
    items_max=4 * 1024 * 1024,
    list_max=4 * 1024 * 1024,
)
WORKER_TO_KEEPER = Dialect(
    "worker to keeper",
    {64: Planned, 65: Progress, 66: Done, 67: Failed},
    body_max_bytes=DAEMON_BODY_MAX_BYTES,
    fds_max=1,
    items_max=64 * 1024,
    list_max=1024,
)
