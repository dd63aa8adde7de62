"""All ranks or none: the pure core of a change that goes over every rank of a group.

Owns the rules of the protocol as values and functions: what a rank may do with what it holds, and the one record that
decides, which lies in the *leader's* (rank 0's) vault state. No I/O, no clock. The keeper carries them out
(``daemon/``), the coordinator drives them (``client/``), and the simulation in ``tests/protocol`` walks every
interleaving of both with kills between any two steps.

A change is *opened* at the leader, *prepared* at every rank (loaded, verified, in the vault), *decided* at the leader,
and *applied* by each rank once it has read the decision. The rules that make it safe, each enforced here:

1. The leader has at most one change open; a decision, once made, never changes.
2. The leader decides for a change only when it has prepared it itself; its own switch is that same record.
3. A rank prepares at most one change at a time, on top of the generation that the coordinator saw there.
4. A prepared rank serves what it served, and waits, until it has read the decision. It never decides alone.
5. A change that the leader does not know was not committed by the leader that is there now. Whoever wants to go on has
   that written down first (:meth:`Ledger.abort`): a rank acts upon what is written only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from weightcached.protocol.errors import UpdateConflict

COMMITTED_MAX = 8
"""Decisions to commit that are remembered. Only the latest can be unknown to a rank: none prepares on top of one that
it has not applied. Those before it are remembered for commands that come late."""
ABORTED_MAX = 64
"""Decisions to abort that are remembered; one that is forgotten is unknown, and is written down again when asked."""


class Outcome(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    """And nothing else since: whoever has it prepared switches."""
    SUPERSEDED = "superseded"
    """Committed, and another change since. No rank that has not applied it is left, for the next one was prepared
    everywhere on top of it: who has it prepared *again*, by a command that came late, drops it."""
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """The leader has no record of it: it lost its vault, or the change was aborted long ago."""

    @property
    def is_commit(self) -> bool:
        return self in (Outcome.COMMITTED, Outcome.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class Versions:
    """A version as ranks compare it: the best that is known, and the one that stood in before a digest was."""

    version: str
    receipts_version: str

    def same(self, other: Versions) -> bool:
        """Whether both stand for one state: two ranks may have looked on either side of the digest's arrival."""
        return self.version == other.version or self.receipts_version == other.receipts_version


@dataclass(frozen=True, slots=True)
class Held:
    """A generation of one rank."""

    generation: str
    versions: Versions


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a rank holds, finished, for a change that it knows no decision of."""

    transaction: str
    held: Held


@dataclass(frozen=True, slots=True)
class Decision:
    """What the leader's record says of a change. ``versions`` of what was committed."""

    transaction: str
    outcome: Outcome
    versions: Versions | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The leader's record of changes: the one that is open, and those that were decided, newest last."""

    open: str | None = None
    committed: tuple[Decision, ...] = ()
    aborted: tuple[str, ...] = ()

    def decision(self, transaction: str) -> Decision:
        """What is written about ``transaction``."""
        if transaction == self.open:
            return Decision(transaction, Outcome.OPEN)
        for decided in self.committed:
            if decided.transaction == transaction:
                is_last = decided is self.committed[-1]
                return decided if is_last else dataclasses.replace(decided, outcome=Outcome.SUPERSEDED)
        outcome = Outcome.ABORTED if transaction in self.aborted else Outcome.UNKNOWN
        return Decision(transaction, outcome)

    def opened(self, transaction: str) -> Ledger:
        """The record with ``transaction`` open. Again is the same. UpdateConflict while another is, or once decided."""
        found = self.decision(transaction)
        if found.outcome is Outcome.OPEN:
            return self
        if found.outcome is not Outcome.UNKNOWN:
            raise UpdateConflict(
                "this change is decided already", expected="one that is open", found=f"{transaction}: {found.outcome}"
            )
        if self.open is not None:
            raise UpdateConflict(
                "another change is under way",
                expected="none that is open at rank 0",
                found=f"transaction {self.open}",
                next_step="wait for it; if whoever began it is gone, `weightcached update --resolve` ends it",
            )
        return dataclasses.replace(self, open=transaction)

    def commit(self, transaction: str, prepared: Prepared | None) -> Ledger:
        """The record with ``transaction`` committed: rule 1 and 2, or UpdateConflict."""
        found = self.decision(transaction)
        if found.outcome.is_commit:
            return self
        if found.outcome is not Outcome.OPEN or prepared is None or prepared.transaction != transaction:
            raise UpdateConflict(
                "this change cannot be committed",
                expected="a change that is open, and prepared at rank 0",
                found=f"{transaction}: {found.outcome}, {'' if prepared else 'not '}prepared",
                next_step="begin it anew",
            )
        decided = Decision(transaction, Outcome.COMMITTED, prepared.held.versions)
        return dataclasses.replace(self, open=None, committed=(*self.committed, decided)[-COMMITTED_MAX:])

    def abort(self, transaction: str) -> Ledger:
        """The record with ``transaction`` aborted, whether it was open or unknown. UpdateConflict once committed."""
        found = self.decision(transaction)
        if found.outcome is Outcome.ABORTED:
            return self
        if found.outcome.is_commit:
            raise UpdateConflict(
                "this change is committed", found=transaction, next_step="roll back with `weightcached rollback`"
            )
        still_open = None if self.open == transaction else self.open
        return dataclasses.replace(self, open=still_open, aborted=(*self.aborted, transaction)[-ABORTED_MAX:])


def require_may_prepare(transaction: str, *, base: str, current: Held, prepared: Prepared | None) -> None:
    """Rule 3: whether a rank that serves ``current`` may begin to prepare ``transaction`` on top of generation
    ``base``. UpdateConflict if not.
    """
    if prepared is not None and prepared.transaction != transaction:
        raise UpdateConflict(
            "this rank holds another change whose decision it has not read",
            expected="none that waits",
            found=f"transaction {prepared.transaction}",
            next_step="`weightcached update --resolve` ends it as rank 0's record says",
        )
    if base != current.generation:
        raise UpdateConflict(
            "this rank serves another generation than the change is for",
            expected=f"generation {base}",
            found=f"generation {current.generation}",
            next_step="look at what is served now, and begin anew",
        )


class Action(StrEnum):
    """What a prepared rank does once it has read what the leader wrote."""

    WAIT = "wait"
    SWITCH = "switch"
    DROP = "drop"


def action(prepared: Prepared, decision: Decision) -> Action:
    """Rule 4. UpdateConflict where the leader committed another version than is prepared here: neither is used, and
    what is served stays.
    """
    if decision.outcome in (Outcome.ABORTED, Outcome.SUPERSEDED):
        return Action.DROP
    if decision.outcome is not Outcome.COMMITTED:
        return Action.WAIT
    if decision.versions is None or not decision.versions.same(prepared.held.versions):
        raise UpdateConflict(
            "rank 0 committed another version than this rank prepared",
            expected=prepared.held.versions.version,
            found=decision.versions.version if decision.versions is not None else None,
            next_step="load this rank anew: `weightcached release` it, and start its daemon again",
        )
    return Action.SWITCH


def same_on_all(held: list[Held]) -> bool:
    """Whether every rank has the same version, by pairs: what a coordinator asks before it opens, and before it
    decides.
    """
    return all(one.versions.same(other.versions) for one in held for other in held)
