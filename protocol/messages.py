"""What a client and a daemon say to each other: a closed set of frozen messages, unknown fields rejected.

Owns the messages of the data plane and the two dialects (one per direction) that say which may travel which way and how
large they may be. ``framing.py`` turns them into bytes. Nothing here can carry code or a path to be opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from weightcached.protocol.config import Provenance
from weightcached.protocol.memory.chosen import Memory

PROTOCOL_VERSION = 1

CLIENT_BODY_MAX_BYTES = 64 * 1024
DAEMON_BODY_MAX_BYTES = 1024 * 1024
GRANT_FDS_MAX = 64
GRANT_SEGMENTS_MAX = GRANT_FDS_MAX - 2
"""Beside the manifest, and the process whose memory they may be."""
GENERATIONS_MAX = 64
"""That one daemon holds at a time."""
WAIT_MAX_S = 24 * 3600.0
EVENT_DROPS_MAX = 64
TEXT_MAX_CHARACTERS = 4096
"""Of a text that says what went wrong: several of them fit a frame, whatever they hold."""

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
SHORT_TEXT_MAX = 1024
ShortText = Annotated[str, StringConstraints(max_length=SHORT_TEXT_MAX)]
LongText = Annotated[str, StringConstraints(max_length=32 * 1024)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def shortened(text: str) -> str:
    """``text``, cut to what a frame's field may hold; what JSON can say but UTF-8 cannot is escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= TEXT_MAX_CHARACTERS else text[: TEXT_MAX_CHARACTERS - 1] + "…"


class Message(BaseModel):
    """Base of every message: immutable, strictly typed, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Hello(Message):
    """A client asks for weights. Sent again on the same connection, with ``digest``, to answer :class:`Unproven`."""

    client_version: ShortText
    name: ShortText
    pid: Count
    config: dict[ShortText, JsonValue]
    """The config's entries, abbreviated (``config.py``)."""
    fingerprint: Hex64
    receipts: Hex64 | None
    receipts_trusted: bool
    digest: Hex64 | None
    want: ShortText
    """``checkpoint``, ``current``, or a version."""
    wait_s: Annotated[float, Field(ge=0, le=WAIT_MAX_S, allow_inf_nan=False)]
    disk_fallbacks: Count = 0
    """How often this process loaded from disk because it found no daemon: nobody else could tell."""


class Resume(Message):
    """A client that holds a generation already asks for a lease of it, on a new connection: the keeper was restarted.

    Answered with a :class:`Grant` that carries no descriptors, or ``Refused``: ``generation_gone`` when another
    generation is served here now, or will be. While the keeper finds out, :class:`Loading` comes first.
    """

    client_version: ShortText
    name: ShortText
    pid: Count
    generation: Hex32
    manifest_sha256: Hex64
    disk_fallbacks: Count = 0


class Release(Message):
    """Give up the weights and the place: empty the vault, remove the socket file, stop. Answered with
    :class:`Released` before it is done; it is done when the socket file is gone. Only root and the daemon's own user
    may say it.
    """

    quarantined_only: bool = False
    """Give up only what is held and not served, and go on serving."""


BUCKET_MIN_NBYTES = 64 * 1024
BUCKET_MAX_NBYTES = 1 << 30
BUCKET_MULTIPLE_NBYTES = 4096
BUCKETS_MAX = GRANT_FDS_MAX - 1


class Stage(Message):
    """A trainer will push the weights of a change that this daemon prepares (``control.FromTrainer``). The daemon says
    :class:`Loading` until it can take them, then :class:`Staged`. The connection is held until the change is decided:
    its end before that gives the change up, and :class:`Refused` on it says why the daemon did. So does the end of
    ``timeout_s``, after which nobody counts on the trainer. Only root and the daemon's own user may say it.
    """

    client_version: ShortText
    name: ShortText
    pid: Count
    transaction: Hex32
    timeout_s: Annotated[float, Field(ge=0, le=WAIT_MAX_S, allow_inf_nan=False)]
    bucket_nbytes: Annotated[int, Field(ge=BUCKET_MIN_NBYTES, le=BUCKET_MAX_NBYTES, multiple_of=BUCKET_MULTIPLE_NBYTES)]
    bucket_count: Annotated[int, Field(ge=1, le=BUCKETS_MAX)]


class GiveUp(Message):
    """After :class:`Stage`, instead of the decision: the trainer pushes no more, and says why. Not answered."""

    reason: LongText


class Switch(Message):
    """On a lease: ask for another generation, by its id or its version; with neither for the one granted now.

    Answered with a :class:`Grant` and its descriptors, or ``Refused``: ``generation_gone`` where it is not held here,
    ``daemon_not_ready`` where it is prepared and whether it may be served is being read.
    From the grant on the lease is of that generation; a refusal leaves it what it was.
    """

    generation: Hex32 | None = None
    version: ShortText | None = None


class Status(Message):
    """Ask for a :class:`Report`."""


class Ping(Message):
    """Ask for a :class:`Pong` with the same token."""

    token: Count


class Loading(Message):
    """Not ready yet; repeated while the client waits."""

    stage: ShortText
    bytes_done: Count
    bytes_total: Count
    bytes_per_s: Seconds


class AccountingCounts(Message):
    """How many checkpoint tensors were expected, loaded, ignored and unexpected; the names are in the manifest."""

    expected: Count
    loaded: Count
    ignored: Count
    unexpected: Count


class SegmentInfo(Message):
    """One segment: the memory kind that says how to import its descriptor, and its size."""

    memory: Memory
    nbytes: Count


class Grant(Message):
    """The weights. Carries ``1 + len(segments)`` descriptors: the manifest, then each segment in order; and, where the
    segments are a process's memory, that process. As the answer to :class:`Resume` it carries none: the client has
    them.

    ``version`` is the best known; ``receipts_version`` is the one that stood in before the content digest was known, so
    that two ranks that attached on either side of that moment still have one thing to compare.
    """

    generation: Hex32
    version: ShortText
    receipts_version: ShortText
    nonce: Hex32
    manifest_sha256: Hex64
    manifest_nbytes: Count
    segments: Annotated[tuple[SegmentInfo, ...], Field(strict=False, max_length=GRANT_SEGMENTS_MAX)]
    resident_nbytes: Count
    """What the segments take of the memory, of a GPU's in whole pages: what an engine leaves out of its own budget."""
    accounting: AccountingCounts
    digest: Hex64 | None
    provenance: Provenance


class Unproven(Message):
    """Receipts did not prove equal content. The client may answer with another Hello that carries the digest."""

    reason: LongText
    rule: LongText
    """Which rule decided: for the log of whoever wonders why a digest was needed."""


class DifferingField(Message):
    """One config entry that differs, with the daemon's full value (``present`` is false when it has none)."""

    name: ShortText
    present: bool
    value: JsonValue


class Refused(Message):
    """No. ``code`` is a code of the error tree; the other fields fill the error the client raises."""

    code: ShortText
    message: LongText
    expected: LongText | None = None
    found: LongText | None = None
    where: LongText | None = None
    next_step: LongText | None = None
    fields: Annotated[tuple[DifferingField, ...], Field(strict=False)] = ()


class Pong(Message):
    token: Count


class Event(Message):
    """Said unasked on a lease. ``published``: ``generation`` is what engines are granted from now on. ``draining``: the
    daemon stops, the weights in use stay valid. ``failed``: it could not do what it was about to, and why.
    """

    kind: Literal["published", "draining", "failed"]
    generation: Hex32 | None
    message: LongText
    version: ShortText | None = None
    """Of ``published``: that of ``generation``, for ranks to compare before they use it."""
    receipts_version: ShortText | None = None
    """The same: one of the two has to be equal, as with grants."""
    drops: Annotated[tuple[ShortText, ...], Field(strict=False, max_length=EVENT_DROPS_MAX)] = ()
    """Of ``published``: what an engine has to drop when it switches, because it was computed from other weights."""


class Released(Message):
    """What is being given up."""

    generations: Count
    resident_nbytes: Count


class Staged(Message):
    """Weights can be pushed. Carries ``1 + bucket_count`` descriptors: a connected socket to the worker, on which the
    messages of ``push_messages.py`` are said, then each bucket, writable memory that can be neither shrunk nor grown.
    """

    generation: Hex32
    """What it will be when it is prepared."""
    base_version: ShortText
    """Of the generation that is served, which the push is on top of: the one of its two that never changes."""
    bucket_nbytes: Count
    bucket_count: Count


class LeaseInfo(Message):
    """One open lease, for people."""

    pid: Count
    uid: Count
    name: ShortText
    age_s: Seconds
    silent_s: Seconds = 0.0
    """Since the engine was last heard: it gives a sign of life every few seconds."""


Standing = Literal["current", "previous", "prepared"]
"""``current`` is granted; ``previous`` is held for rollback, or because it is leased or pinned; ``prepared`` waits for
a decision and is granted to nobody."""


class GenerationInfo(Message):
    """One generation that a daemon holds."""

    generation: Hex32
    version: ShortText
    receipts_version: ShortText
    standing: Standing
    origin: LongText
    """Where the weights came from, for people: a path, or who pushed them."""
    digest: Hex64 | None
    resident_nbytes: Count
    leases: Count
    pinned: bool
    pinned_for_s: Seconds | None = None
    """Of a pin that ends by itself: after an adoption engines get time to resume their leases."""
    age_s: Seconds
    """Since it was published or prepared here."""


VaultState = Literal["none", "unproven", "kept", "dropped"]
"""What happens to the weights when the keeper dies. ``kept``: they outlive it, which was proven. ``unproven``: the
service manager was given them, and does not say whether it keeps them. ``dropped``: it did not keep them. ``none``: no
service manager with a store, or nothing to keep yet."""


class Durations(Message):
    """How long something took, each time it happened: a histogram. ``counts[i]`` times it took at most ``bounds_s[i]``,
    and longer than the bound before; the last count, one more than there are bounds, is of those that took longer than
    all. ``total_s`` is their sum.
    """

    bounds_s: Annotated[tuple[Seconds, ...], Field(strict=False, max_length=64)]
    counts: Annotated[tuple[Count, ...], Field(strict=False, max_length=65)]
    total_s: Seconds

    @model_validator(mode="after")
    def _one_count_for_each_bound_and_one_more(self) -> Durations:
        if len(self.counts) != len(self.bounds_s) + 1:
            raise ValueError(f"{len(self.counts)} counts do not go with {len(self.bounds_s)} bounds")
        return self


class Report(Message):
    """A snapshot of one daemon: everything ``weightcached status`` shows comes from here."""

    daemon_version: ShortText
    pid: Count
    place: ShortText
    socket_path: ShortText
    model: ShortText
    """Where what is served came from: a directory, a hub id, or who pushed it; before that, what is to be loaded."""
    layout: ShortText
    tp_rank: Count
    tp_size: Count
    dtype: ShortText
    quantization: ShortText
    memory: ShortText
    state: ShortText
    stage: ShortText
    bytes_done: Count
    bytes_total: Count
    bytes_per_s: Seconds
    resident_nbytes: Count
    own_memory_nbytes: Count
    """The keeper's anonymous memory (RssAnon)."""
    generation: Hex32 | None
    version: ShortText | None
    fingerprint: Hex64 | None
    digest: Hex64 | None
    leases: Annotated[tuple[LeaseInfo, ...], Field(strict=False)]
    """The oldest open leases: as many as fit in a frame."""
    lease_count: Count
    last_error: LongText | None
    uptime_s: Seconds
    load_seconds: dict[str, Seconds]
    """Seconds per stage of this keeper's load; empty where it adopted what it serves."""
    bytes_read: Count
    """By this keeper's load: none where it adopted."""
    bytes_kept: Count = 0
    """What of the files' bytes became part of a parameter, when the weights that are served were loaded."""
    accounting: AccountingCounts | None = None
    """Of the weights that are served; the names, and the reasons of what is ignored, are in their manifest."""
    attaches: dict[str, Count]
    """Attach attempts by outcome: ``granted``, ``resumed``, or the code they were refused with."""
    vault: VaultState = "none"
    vault_reason: LongText | None = None
    """Why it is not ``kept``."""
    proven: bool = False
    """Whether the files on disk were seen to be what is served, by this keeper or, unchanged since, by the one that
    loaded them."""
    unproven_reason: LongText | None = None
    """Why adopted weights are not proven (yet). They are served all the same."""
    generations: Count = 0
    """How many are held, quarantined ones included."""
    held: Annotated[tuple[GenerationInfo, ...], Field(strict=False, max_length=GENERATIONS_MAX)] = ()
    """Those that are served or may be, the current one first, then the others, the newest first."""
    quarantined: Annotated[tuple[Hex32, ...], Field(strict=False)] = ()
    """Held, but not served: their adoption failed too often."""
    quarantined_nbytes: Count = 0
    starts: Count = 0
    """Keepers that have held this vault, this one included."""
    adoptions: Count = 0
    """How often weights were adopted from this vault."""
    adoption_seconds: Seconds | None = None
    """From the start of this keeper until it served what it adopted; ``None`` when it loaded."""
    heartbeat_age_s: Seconds = 0.0
    """Since the most silent of all open leases was heard."""
    disk_fallbacks: Count = 0
    """What clients said about loading from disk because they found no daemon."""
    connections: Count = 0
    """Open ones, leases included."""
    detached: Count = 0
    """Leases, of those that are open, whose engine has missed several signs of life in a row."""
    protocol_errors: dict[str, Count] = {}
    """Conversations that ended because of what was sent, or not taken, by code."""
    adoption_refusals: dict[str, Count] = {}
    """What came back from the vault and was not adopted by this keeper, by the code of the reason."""
    adoption_attempts: Count = 0
    """Begun since the last one that ended; too many, and the generation that was looked at is quarantined."""
    unexplained_nbytes: Count = 0
    """Of weights that are held, and neither served nor leased."""
    attach_durations: Durations | None = None
    """From a Hello to the grant that answers it."""
    load_durations: Durations | None = None
    """Of loads that succeeded, worker's start included."""
    load_rates: dict[str, Seconds] = {}
    """Bytes per second of each stage of this keeper's last load that had bytes, on average."""


@dataclass(frozen=True)
class Dialect:
    """What may travel in one direction: message types by number, and limits.

    ``items_max`` bounds what all maps and lists of a body hold together: an item is one byte on the wire and a hundred
    in memory, and each costs the reader time that others wait for. ``list_max`` bounds one list: room for all that a
    list says it holds is made before any of it is read, and lists may stand in lists.
    """

    name: str
    types: Mapping[int, type[Message]]
    body_max_bytes: int
    fds_max: int
    items_max: int
    list_max: int

    def number_of(self, message: Message) -> int:
        """The type number of ``message``; a ValueError (our own bug) when this direction does not have it."""
        for number, kind in self.types.items():
            if type(message) is kind:
                return number
        raise ValueError(f"{type(message).__name__} does not travel {self.name}")


CLIENT_TO_DAEMON = Dialect(
    "client to daemon",
    {1: Hello, 2: Status, 3: Ping, 4: Resume, 5: Release, 6: Switch, 7: Stage, 8: GiveUp},
    body_max_bytes=CLIENT_BODY_MAX_BYTES,
    fds_max=0,
    items_max=4 * 1024,
    list_max=512,  # what fits into a config's value that is not abbreviated (config.py)
)
DAEMON_TO_CLIENT = Dialect(
    "daemon to client",
    {64: Loading, 65: Grant, 66: Unproven, 67: Refused, 68: Report, 69: Pong, 70: Event, 71: Released, 72: Staged},
    body_max_bytes=DAEMON_BODY_MAX_BYTES,
    fds_max=GRANT_FDS_MAX,
    items_max=256 * 1024,
    list_max=256 * 1024,
)
