"""Commands to real daemons over their control plane, and a whole change of one rank step by step.

changer = Changer(daemon)                       # the place's daemon, whichever process serves it now
changer.update(FromCheckpoint(model_dir=...))   # open, prepare, wait, commit: the RankState afterwards
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TypeVar

from tests.support.daemons import TIMEOUT_S, Daemon
from weightcached.protocol.control import (
    AwaitChange,
    Decide,
    Decided,
    Describe,
    FromCheckpoint,
    FromHeld,
    FromTrainer,
    Open,
    Prepare,
    RankState,
)
from weightcached.protocol.control_channel import ask_blocking
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.messages import Message

_Answer = TypeVar("_Answer", bound=Message)


def other_weights(model: Path, to: Path, *, number: int = 1) -> Path:
    """A checkpoint of the same configuration whose last weight is another; ``number`` tells several apart."""
    shutil.copytree(model, to)
    weights = max(to.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= number
    weights.write_bytes(data)
    return to


class Changer:
    """Drives changes at one place. ``leader`` is rank 0's, where that is another."""

    def __init__(self, daemon: Daemon, leader: Changer | None = None) -> None:
        self.daemon = daemon
        self.leader = leader or self

    def ask(self, request: Message, answer: type[_Answer]) -> _Answer:
        return ask_blocking(
            self.daemon.place, request, answer, deadline=Deadline.after(TIMEOUT_S), patience_s=TIMEOUT_S
        )

    def state(self) -> RankState:
        return self.ask(Describe(), RankState)

    def open(self, transaction: str) -> RankState:
        return self.leader.ask(Open(transaction=transaction, base=self.leader.current()), RankState)

    def current(self) -> str:
        current = self.state().current
        assert current is not None
        return current

    def begin(
        self,
        transaction: str,
        source: FromCheckpoint | FromHeld | FromTrainer,
        *,
        base: str | None = None,
        keep_previous: int | None = None,
    ) -> RankState:
        """Tell this rank to prepare."""
        asked = Prepare(
            transaction=transaction,
            leader=self.leader.daemon.place.device,
            base=base or self.current(),
            source=source,
            keep_previous=keep_previous,
        )
        return self.ask(asked, RankState)

    def ended(self, transaction: str) -> RankState:
        """Wait until it is no longer preparing."""
        return self.ask(AwaitChange(transaction=transaction, timeout_s=TIMEOUT_S), RankState)

    def prepare(
        self, source: FromCheckpoint | FromHeld, *, transaction: str | None = None, keep_previous: int | None = None
    ) -> tuple[str, RankState]:
        """Open, unless ``transaction`` is open already, prepare, and wait for how it ends."""
        if transaction is None:
            self.open(transaction := new_transaction())
        self.begin(transaction, source, keep_previous=keep_previous)
        return transaction, self.ended(transaction)

    def decide(self, transaction: str, *, commit: bool) -> Decided:
        return self.leader.ask(Decide(transaction=transaction, commit=commit), Decided)

    def update(self, source: FromCheckpoint | FromHeld, *, keep_previous: int | None = None) -> RankState:
        """A whole change of a group of one rank."""
        transaction, prepared = self.prepare(source, keep_previous=keep_previous)
        assert prepared.change is not None
        assert prepared.change.state == "prepared", prepared.change
        assert self.decide(transaction, commit=True).outcome == "committed"
        return self.state()


def new_transaction() -> str:
    return secrets.token_hex(16)


def from_directory(model: Path) -> FromCheckpoint:
    return FromCheckpoint(model_dir=str(model))


def standings(state: RankState) -> list[tuple[str, str]]:
    """What is held, as (generation, standing)."""
    return [(one.generation, one.standing) for one in state.generations]
