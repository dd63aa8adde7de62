"""What a change writes into the vault and its state record: what is prepared, what was decided, what is pinned.

Owns the order that leaves something usable whenever the keeper is killed. A generation that is being prepared is
recorded as *staged*, stored, and only then named by the record as prepared: what a killed keeper leaves half done is
known as such, and removed by the next. A decision is **one** write: the ledger, the generation that is current from now
on, and that nothing is prepared any more. A generation that is given up loses its place in the record's change first,
then its descriptors, then its record. The rules are ``protocol/transaction.py``'s; nothing is decided here.
"""

from __future__ import annotations

from weightcached.daemon.custody import DECISION_NBYTES, Custody
from weightcached.daemon.generation import Generation
from weightcached.daemon.state_record import CommittedRecord, LedgerRecord, PreparedRecord
from weightcached.daemon.vault import Keeping
from weightcached.protocol.transaction import Decision, Ledger, Outcome, Versions

CHANGE_NBYTES = DECISION_NBYTES + 48 * 1024
"""Of the state record: what has to be left before a change, or a pin, is begun. Another generation fits into it."""


class ChangeCustody:
    """The part of ``custody`` that belongs to changes. Each write is there whole or not at all."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody

    @property
    def prepared(self) -> PreparedRecord | None:
        """The change that is finished here and waits for its decision."""
        return self._custody.record.prepared

    @property
    def ledger(self) -> Ledger:
        """The leader's record of changes."""
        kept = self._custody.record.ledger
        committed = tuple(
            Decision(one.transaction, Outcome.COMMITTED, Versions(one.version, one.receipts_version))
            for one in kept.committed
        )
        return Ledger(kept.open, committed, kept.aborted)

    def write_ledger(self, ledger: Ledger) -> None:
        """The leader's record, and nothing else. A change that is prepared here is not decided by it."""
        self._custody.change(ledger=_kept(ledger))

    def require_room(self) -> None:
        """Raises InsufficientMemory where the record may not hold what another change writes, decision included."""
        self._custody.require_room(nbytes=CHANGE_NBYTES)

    async def stage(self, generation: Generation, prepared: PreparedRecord) -> Keeping:
        """Put what was made for a change into the vault, and write down that it is prepared. Where the vault does not
        keep it (``dropped``) nothing is written, and nothing is left.
        """
        keeping = await self._custody.store(generation, staged=True)
        if keeping.state != "dropped":
            self._custody.change(prepared=prepared)
        return keeping

    def prepare_held(self, prepared: PreparedRecord) -> None:
        """Write down that a generation which is held already is prepared."""
        self._custody.change(prepared=prepared)

    def commit(self, prepared: PreparedRecord, ledger: Ledger | None) -> None:
        """The switch, in one write: what is prepared is current. With the leader's ``ledger`` this is the decision."""
        record = self._custody.record
        new = record.generation(prepared.generation)
        others = tuple(one for one in record.generations if one.id != prepared.generation)
        self._custody.change(
            generations=others if new is None else (*others, new.model_copy(update={"staged": False})),
            current=prepared.generation if new is not None else None,
            prepared=None,
            keep=prepared.keep,
            ledger=record.ledger if ledger is None else _kept(ledger),
        )

    def abort(self, ledger: Ledger | None) -> None:
        """Nothing is prepared any more. With the leader's ``ledger`` this is the decision. What was made for the change
        is removed after that.
        """
        record = self._custody.record
        self._custody.change(prepared=None, ledger=record.ledger if ledger is None else _kept(ledger))

    def pin(self, generation_id: str, *, pinned: bool) -> None:
        """Whether it is kept whatever else would have it freed. Raises InsufficientMemory where no room is left to say
        that it is.
        """
        if pinned:
            self.require_room()
        others = tuple(one for one in self._custody.record.pins if one != generation_id)
        self._custody.change(pins=(*others, generation_id) if pinned else others)


def _kept(ledger: Ledger) -> LedgerRecord:
    committed = tuple(
        CommittedRecord(
            transaction=one.transaction, version=one.versions.version, receipts_version=one.versions.receipts_version
        )
        for one in ledger.committed
        if one.versions is not None
    )
    return LedgerRecord(open=ledger.open, committed=committed, aborted=ledger.aborted)
