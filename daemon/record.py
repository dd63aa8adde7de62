"""What the keeper knows at this moment: one mutable record that the keeper writes and connections read.

Owns no behaviour beyond making a snapshot of itself (``snapshot.py`` puts it into words). Lives on the event loop's
thread.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field

from weightcached.daemon.digesting import Digesting
from weightcached.daemon.generation import Generation
from weightcached.daemon.leases import LeaseBook
from weightcached.daemon.options import ServeOptions
from weightcached.daemon.progress import Changes, ProgressTracker
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.states import State, StateMachine
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import WeightCacheError


@dataclass(frozen=True, kw_only=True)
class Published:
    """The generation that is granted now, with what belongs to it alone."""

    generation: Generation
    proven: ProvenReceipts
    digesting: Digesting


@dataclass(kw_only=True)
class Record:
    """``config`` and ``published`` are ``None`` until they are known; ``last_error`` is the last that kept us from
    serving.
    """

    options: ServeOptions
    progress: ProgressTracker
    machine: StateMachine
    changes: Changes
    leases: LeaseBook = field(default_factory=LeaseBook)
    attaches: Counter[str] = field(default_factory=Counter)
    """Hello by outcome: ``granted``, ``unproven``, or the code it was refused with."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """Says "same run of the keeper"."""
    started_s: float = field(default_factory=time.monotonic)
    model_path: str | None = None
    config: CacheConfig | None = None
    published: Published | None = None
    last_error: WeightCacheError | None = None

    @property
    def state(self) -> State:
        return self.machine.state
