"""What is said on the control plane: commands to one daemon, its answers, and events to whoever listens.

Owns the messages and their dialects. They travel over ZeroMQ at a place's own two sockets (``places.py``): one frame
(``framing.py``: magic, protocol version, type, length, msgpack map) in each ZeroMQ message, never with descriptors.
Nothing here can hand out memory, name code, or be executed. A command is answered once; one that takes long is answered
when it has begun, and :class:`AwaitChange` waits for its end. Every command may be sent again: it then finds what it
has done already.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weightcached.protocol.messages import GENERATIONS_MAX as GENERATIONS_MAX
from weightcached.protocol.messages import (
    Count,
    Dialect,
    GenerationInfo,
    Hex32,
    Hex64,
    LongText,
    Message,
    Refused,
    Report,
    Seconds,
    ShortText,
    Status,
)
from weightcached.protocol.transaction import Decision, Outcome, Versions

CONTROL_REQUEST_MAX_BYTES = 64 * 1024
CONTROL_ANSWER_MAX_BYTES = 1024 * 1024
SUBSCRIPTION_MAX_BYTES = 64

# Commands


class Describe(Message):
    """Ask for :class:`RankState`."""


class FromCheckpoint(Message):
    """New weights out of a directory of this host."""

    kind: Literal["checkpoint"] = "checkpoint"
    model_dir: LongText
    """An absolute path."""
    hub_id: ShortText | None = None


class FromHeld(Message):
    """Weights that the daemon holds already: a rollback, or forward again."""

    kind: Literal["held"] = "held"
    version: ShortText
    receipts_version: ShortText | None = None
    """The two by which ranks compare (``transaction.Versions``), either of which is enough: one rank may know the
    content digest before another does."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that are said."""
        return tuple(word for word in (self.version, self.receipts_version) if word is not None)


class FromTrainer(Message):
    """Weights that a trainer pushes over the data plane (``Stage``); it names the same transaction there."""

    kind: Literal["trainer"] = "trainer"
    partial: bool
    """What is not pushed is taken from the generation that is served."""


Source = Annotated[FromCheckpoint | FromHeld | FromTrainer, Field(discriminator="kind")]


class Open(Message):
    """To the leader, first: write down that this change is under way. Answered with :class:`RankState`."""

    transaction: Hex32
    base: Hex32
    """The generation that the leader serves, as the coordinator saw it."""


class Prepare(Message):
    """Begin to prepare a change. Answered with :class:`RankState` when it has begun (or is done: it may be sent again).

    ``leader`` is the device word of rank 0's place, in the same directory and under the same name.
    """

    transaction: Hex32
    leader: ShortText
    base: Hex32
    source: Source
    keep_previous: Count | None = None
    """How many generations besides the new one are kept for rollback; the daemon's own setting where ``None``."""


class AwaitChange(Message):
    """Answered with :class:`RankState` once ``transaction`` is no longer ``preparing`` here, or at the timeout."""

    transaction: Hex32
    timeout_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class Decide(Message):
    """To the leader: commit (only what is open, and prepared there) or abort. The first decision stands. Answered with
    :class:`Decided`.
    """

    transaction: Hex32
    commit: bool


class ReadDecision(Message):
    """To the leader: what is written about a change? Answered with :class:`Decided`."""

    transaction: Hex32


class Resolve(Message):
    """Read the leader's record now, and act upon it. Answered with :class:`RankState` afterwards."""

    transaction: Hex32


class Pin(Message):
    """Keep a generation, or no longer, whatever else would have it freed. Answered with :class:`RankState`."""

    generation: Hex32
    pinned: bool


class Drop(Message):
    """Free a generation that is neither served, leased nor part of a change. Answered with :class:`RankState`."""

    generation: Hex32
    force: bool = False
    """Also one that is pinned, or leased: engines keep what they have mapped, and cannot resume."""


# Answers


class RankInfo(Message):
    """Which rank of which group: the place's name, and sizes and ranks of each kind of parallelism."""

    place: ShortText
    tp_rank: Count
    tp_size: Count
    pp_rank: Count
    pp_size: Count
    ep_rank: Count
    ep_size: Count

    @property
    def is_leader(self) -> bool:
        return (self.tp_rank, self.pp_rank, self.ep_rank) == (0, 0, 0)


class ChangeInfo(Message):
    """The change that a rank works at, or has prepared, or ended last."""

    transaction: Hex32
    state: Literal["preparing", "prepared", "committed", "aborted", "failed"]
    generation: Hex32 | None = None
    leader: ShortText
    error_code: ShortText | None = None
    error: LongText | None = None
    """Why it failed."""


class RankState(Message):
    """Everything that a coordinator has to know about one rank."""

    rank: RankInfo
    state: ShortText
    """Of the daemon: ``ready``, ``updating``, …"""
    vault_id: Hex32
    """Of the state record: another one than before, and what was decided then is not known any more."""
    fingerprint: Hex64 | None
    current: Hex32 | None
    generations: Annotated[tuple[GenerationInfo, ...], Field(strict=False, max_length=GENERATIONS_MAX)]
    change: ChangeInfo | None
    open: Hex32 | None
    """At the leader: the change that is open."""

    def generation(self, generation: str | None) -> GenerationInfo | None:
        """What is known about that generation, if it is held."""
        return next((one for one in self.generations if one.generation == generation), None)


class Decided(Message):
    """What the leader's record says about a change. ``version`` and ``receipts_version`` are of what was committed."""

    transaction: Hex32
    outcome: Annotated[Outcome, Field(strict=False)]
    version: ShortText | None = None
    receipts_version: ShortText | None = None
    vault_id: Hex32

    @property
    def decision(self) -> Decision:
        """As the rules take it."""
        versions = None
        if self.version is not None and self.receipts_version is not None:
            versions = Versions(self.version, self.receipts_version)
        return Decision(self.transaction, self.outcome, versions)


# Events

EventKind = Literal[
    "snapshot",  # what things are like: said to a new listener first
    "state",
    "progress",
    "published",
    "lease_opened",
    "lease_closed",
    "generation_dropped",
    "change",
    "draining",
    "failed",
]


class ControlEvent(Message):
    """Something happened. ``sequence`` counts a daemon's events: a gap says that some were missed.

    Which fields are there depends on the kind: ``rank_state`` of ``snapshot``, ``published`` and ``change``; ``pid``
    and ``name`` of leases; ``stage`` and bytes of ``progress``.
    """

    kind: EventKind
    nonce: Hex32
    """Of this run of the keeper."""
    sequence: Count
    place: ShortText
    time_s: Seconds
    """Since the epoch."""
    state: ShortText
    generation: Hex32 | None = None
    version: ShortText | None = None
    drops: Annotated[tuple[ShortText, ...], Field(strict=False, max_length=16)] = ()
    """Of ``published``: what an engine that switches has to drop (``prefix_cache``, ``kv_cache``,
    ``derived_tensors``)."""
    message: LongText = ""
    stage: ShortText | None = None
    bytes_done: Count = 0
    bytes_total: Count = 0
    bytes_per_s: Seconds = 0.0
    pid: Count | None = None
    uid: Count | None = None
    name: ShortText | None = None
    rank_state: RankState | None = None


CONTROL_REQUESTS = Dialect(
    "control to daemon",
    {
        128: Describe,
        129: Open,
        130: Prepare,
        131: AwaitChange,
        132: Decide,
        133: ReadDecision,
        134: Resolve,
        135: Pin,
        136: Drop,
        137: Status,
    },
    body_max_bytes=CONTROL_REQUEST_MAX_BYTES,
    fds_max=0,
    items_max=4 * 1024,
    list_max=512,
)
CONTROL_ANSWERS = Dialect(
    "daemon to control",
    {160: RankState, 161: Decided, 162: Refused, 163: Report},
    body_max_bytes=CONTROL_ANSWER_MAX_BYTES,
    fds_max=0,
    items_max=64 * 1024,
    list_max=64 * 1024,
)
CONTROL_EVENTS = Dialect(
    "daemon to listeners",
    {192: ControlEvent},
    body_max_bytes=CONTROL_ANSWER_MAX_BYTES,
    fds_max=0,
    items_max=64 * 1024,
    list_max=64 * 1024,
)
EVENTS_TOPIC = b"e"
"""What a listener subscribes to, for every event."""
SUBSCRIPTIONS_MAX = 16
"""Of one listener at a time."""
