"""What the keeper knows at this moment: one mutable record that the keeper writes and connections read.

Owns no behaviour beyond making a snapshot of itself (``snapshot.py`` puts it into words). Lives on the event loop's
thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weightcached.daemon.custody import Custody
from weightcached.daemon.durations import ATTACH_BOUNDS_S, LOAD_BOUNDS_S, DurationCounts
from weightcached.daemon.events import Events
from weightcached.daemon.generations import Generations, Published
from weightcached.daemon.leases import FallbackCount, LeaseBook
from weightcached.daemon.options import ServeOptions
from weightcached.daemon.progress import Changes, ProgressTracker
from weightcached.daemon.quota import Quota
from weightcached.daemon.states import State, StateMachine
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import InternalError, WeightCacheError
from weightcached.protocol.memory.chosen import Memory
from weightcached.protocol.messages import Message, Release, Released, Stage


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What clients use of it, and how much they may."""

    connections: Quota
    leases: Quota
    in_flight: Quota
    """Bytes."""

    @classmethod
    def of(cls, options: ServeOptions) -> Limits:
        in_flight_nbytes = options.in_flight_max_mib << 20
        return cls(
            connections=Quota(
                in_all=options.connections_max,
                each=options.connections_per_uid_max,
                reserve=options.connections_max // 32,
            ),
            leases=Quota(in_all=options.connections_max, each=options.leases_per_uid_max),
            in_flight=Quota(in_all=in_flight_nbytes, each=in_flight_nbytes // 2, reserve=in_flight_nbytes // 8),
        )


class Stages(Protocol):
    """Attends to trainers that push."""

    async def attend(self, stage: Stage, channel: AsyncChannel, tell: Tell) -> None: ...


Tell = Callable[[Message, Sequence[int]], Awaitable[None]]
"""Says something to a client, with descriptors, which stay the caller's."""


@dataclass(kw_only=True)
class Record:
    """``memory``, ``config`` and ``published`` are ``None`` until they are known; ``last_error`` is the last that kept
    us from serving what was asked for. Why a change failed is the change's own, and told to whoever began it.
    """

    options: ServeOptions
    progress: ProgressTracker
    machine: StateMachine
    changes: Changes
    limits: Limits
    generations: Generations
    release: Callable[[Release], Awaitable[Released]]
    """Carries out what a client that may say so has said."""
    awaits_decision: Callable[[str], bool] = lambda version: False
    """Whether weights of that version are prepared here, and wait for a decision; it is then looked for."""
    staging: Stages | None = None
    """Who attends to trainers, once something is served."""
    custody: Custody | None = None
    adoption_seconds: float | None = None
    """From the start of this process until it served what it adopted."""
    leases: LeaseBook = field(default_factory=LeaseBook)
    fallbacks: FallbackCount = field(default_factory=FallbackCount)
    attaches: Counter[str] = field(default_factory=Counter)
    """Hello and Resume by outcome: ``granted``, ``resumed``, ``unproven``, or the code it was refused with."""
    attach_durations: DurationCounts = field(default_factory=lambda: DurationCounts(ATTACH_BOUNDS_S))
    load_durations: DurationCounts = field(default_factory=lambda: DurationCounts(LOAD_BOUNDS_S))
    protocol_errors: Counter[str] = field(default_factory=Counter)
    """Conversations that ended because of what a client sent or did not take, by code."""
    adoption_refusals: Counter[str] = field(default_factory=Counter)
    """What was not adopted, by the code of the reason."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """Says "same run of the keeper"."""
    started_s: float = field(default_factory=time.monotonic)
    memory: Memory | None = None
    config: CacheConfig | None = None
    last_error: WeightCacheError | None = None
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.events = Events(self)

    @property
    def known_memory(self) -> Memory:
        """For whoever comes after it was chosen."""
        if self.memory is None:
            raise InternalError("the memory kind is wanted before it is known")
        return self.memory

    @property
    def published(self) -> Published | None:
        """The generation that is granted now to whoever asks for no other."""
        return self.generations.current

    @property
    def state(self) -> State:
        return self.machine.state
