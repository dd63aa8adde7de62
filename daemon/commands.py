"""What the control plane may ask of a keeper, and what it answers: every request of ``CONTROL_REQUESTS``.

Owns the meaning of each command, and the leader's record of changes: who may open and decide, and what it says. Knows
nothing of sockets (``daemon/control`` does). Every command may be sent again, and then finds what it has done already.
Nothing here hands out memory.
"""

from __future__ import annotations

import logging

from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.changing import Changing
from weightcached.daemon.custody import Custody
from weightcached.daemon.following import Following
from weightcached.daemon.freeing import Freeing
from weightcached.daemon.generation import Generation
from weightcached.daemon.generations import is_version
from weightcached.daemon.rank_state import rank_info, rank_state
from weightcached.daemon.record import Record
from weightcached.daemon.snapshot import report
from weightcached.daemon.states import State
from weightcached.protocol.control import (
    AwaitChange,
    Decide,
    Decided,
    Describe,
    Drop,
    Open,
    Pin,
    Prepare,
    RankState,
    ReadDecision,
    Resolve,
)
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonDraining,
    DaemonNotReady,
    GenerationGone,
    InvalidOption,
    ProtocolError,
    UpdateConflict,
)
from weightcached.protocol.messages import Message, Status
from weightcached.protocol.places import Place
from weightcached.protocol.transaction import Outcome

log = logging.getLogger(__name__)


class Commands:
    """Made by the keeper. ``following`` is ``None`` at the leader."""

    def __init__(
        self,
        record: Record,
        custody: Custody,
        changes: ChangeCustody,
        changing: Changing,
        freeing: Freeing,
        following: Following | None,
    ) -> None:
        self._record = record
        self._custody = custody
        self._changes = changes
        self._changing = changing
        self._freeing = freeing
        self._following = following

    async def handle(self, request: Message) -> Message:
        """The answer to ``request``. Raises the WeightCacheError that it is refused with."""
        match request:
            case Describe():
                return self.describe()
            case Status():
                return report(self._record)
            case Open():
                return self._open(request)
            case Prepare():
                return self._prepare(request)
            case AwaitChange():
                return await self._await_change(request)
            case Decide():
                return await self._decide(request)
            case ReadDecision():
                self._require_leader()
                return self._decided(request.transaction)
            case Resolve():
                return await self._resolve(request)
            case Pin():
                return self._pin(request)
            case Drop():
                return await self._drop(request)
        raise ProtocolError("no command of this plane", found=type(request).__name__)

    def describe(self) -> RankState:
        """What is the case here, now."""
        return rank_state(
            self._record,
            vault_id=self._custody.vault_id,
            change=self._changing.info,
            opened=self._changes.ledger.open if self._is_leader else None,
        )

    # The leader's record

    @property
    def _is_leader(self) -> bool:
        return rank_info(self._record.options.place.name, self._record.options.parallel).is_leader

    def _require_leader(self) -> None:
        if not self._is_leader:
            raise InvalidOption(
                "only rank 0 has the record of changes",
                expected="rank 0 of every kind",
                found=self._record.options.place.device,
                next_step="ask the leader's place",
            )

    def _open(self, asked: Open) -> RankState:
        self._require_leader()
        current = self._changing.require_serving()
        ledger = self._changes.ledger
        if ledger.open != asked.transaction:
            opened = ledger.opened(asked.transaction)
            if asked.base != current.id:
                raise UpdateConflict(
                    "rank 0 serves another generation than the change is for",
                    expected=f"generation {asked.base}",
                    found=f"generation {current.id}",
                    next_step="look at what is served now, and begin anew",
                )
            self._changes.write_ledger(opened)
            log.info("change opened", extra={"transaction": asked.transaction})
            self._record.changes.announce()
        return self.describe()

    async def _decide(self, asked: Decide) -> Decided:
        self._require_leader()
        if asked.commit:
            self._changing.require_serving()
            ledger = self._changes.ledger.commit(asked.transaction, self._changing.prepared)
            if ledger != self._changes.ledger:
                self._changing.commit(asked.transaction, ledger)
                log.info("change decided", extra={"transaction": asked.transaction, "outcome": "committed"})
        else:
            self._require_settled()
            ledger = self._changes.ledger.abort(asked.transaction)
            if ledger != self._changes.ledger:
                await self._changing.abort(asked.transaction, ledger)
                log.info("change decided", extra={"transaction": asked.transaction, "outcome": "aborted"})
        return self._decided(asked.transaction)

    def _decided(self, transaction: str) -> Decided:
        decision = self._changes.ledger.decision(transaction)
        return Decided(
            transaction=transaction,
            outcome=decision.outcome,
            version=decision.versions.version if decision.versions is not None else None,
            receipts_version=decision.versions.receipts_version if decision.versions is not None else None,
            vault_id=self._custody.vault_id,
        )

    # Every rank

    def _prepare(self, asked: Prepare) -> RankState:
        place = self._record.options.place
        own = place.device
        Place(place.runtime_dir, place.name, asked.leader)  # InvalidOption: nobody could ever be asked there
        if (asked.leader == own) is not self._is_leader:
            raise InvalidOption(
                "the change names another leader than this rank knows",
                expected="the device word of rank 0's place",
                found=asked.leader,
                where=own,
            )
        known = self._changing.info
        if known is None or known.transaction != asked.transaction:
            if self._is_leader and self._changes.ledger.decision(asked.transaction).outcome is not Outcome.OPEN:
                raise UpdateConflict(
                    "this change is not open at rank 0",
                    expected="one that was opened, and not decided",
                    found=f"{asked.transaction}: {self._changes.ledger.decision(asked.transaction).outcome}",
                    next_step="begin it anew",
                )
            self._changing.prepare(asked)
            self.follow()
        return self.describe()

    def follow(self) -> None:
        """Read the leader's record from now on, until the change that is under way here is decided."""
        if self._following is not None:
            self._following.start()

    def wants(self, version: str) -> bool:
        """Whether an engine that wants ``version`` has to wait for a decision: it is what is prepared here. The
        leader's record is then read at once.
        """
        waiting = self._changes.prepared
        held = self._record.generations.get(waiting.generation) if waiting is not None else None
        if held is None or not held.staged or not is_version(held.generation, version):
            return False
        if self._following is not None:
            self.follow()
            self._following.look_soon()
        return True

    async def _await_change(self, asked: AwaitChange) -> RankState:
        deadline = Deadline.after(asked.timeout_s)
        while True:
            info = self._changing.info
            busy = info is not None and (info.transaction, info.state) == (asked.transaction, "preparing")
            if not busy or deadline.passed:
                return self.describe()
            await self._record.changes.wait(deadline.remaining_s())

    async def _resolve(self, asked: Resolve) -> RankState:
        self._require_settled()
        info = self._changing.info
        if self._following is not None and info is not None and info.transaction == asked.transaction:
            await self._following.look()
        return self.describe()

    def _require_settled(self) -> None:
        """It is known what is held here."""
        state = self._record.state
        if state in (State.DRAINING, State.STOPPED):
            raise DaemonDraining("the daemon is stopping", next_step="ask the daemon that is started next")
        if state in (State.STARTING, State.ADOPTING):
            raise DaemonNotReady("the daemon does not know yet what it holds", found=f"state {state}")

    def _held(self, generation_id: str) -> Generation:
        held = self._record.generations.get(generation_id)
        if held is None:
            raise GenerationGone(
                "the daemon does not hold this generation",
                expected=f"generation {generation_id}",
                found=", ".join(one.generation.id for one in self._record.generations.all) or "none",
            )
        return held.generation

    def _pin(self, asked: Pin) -> RankState:
        self._changing.require_serving()
        generation = self._held(asked.generation)
        held = self._record.generations
        self._changes.pin(generation.id, pinned=asked.pinned)
        if asked.pinned:
            held.pins.add(generation.id)
        else:
            held.pins.discard(generation.id)
            held.end_grace(generation.id)
            self._freeing.wake()
        log.info("pinned" if asked.pinned else "pinned no longer", extra={"generation": generation.id})
        return self.describe()

    async def _drop(self, asked: Drop) -> RankState:
        self._changing.require_serving()
        held = self._record.generations
        if held.get(asked.generation) is not None:
            self._require_droppable(asked)
            await self._freeing.drop(asked.generation, reason="by command")
        return self.describe()

    def _require_droppable(self, asked: Drop) -> None:
        held = self._record.generations
        standing = "prepared" if asked.generation == held.prepared else held.standing(asked.generation)
        if standing != "previous":
            raise UpdateConflict(
                "this generation is needed",
                expected="one that is neither served nor part of a change",
                found=f"generation {asked.generation}: {standing}",
                next_step="change the weights first; `weightcached release` gives up all of them",
            )
        leases = self._record.leases.counts()[asked.generation]
        if not asked.force and (leases or held.is_pinned(asked.generation)):
            raise UpdateConflict(
                "this generation is in use",
                expected="one that is neither leased nor pinned",
                found=f"{leases} leases, {'' if held.is_pinned(asked.generation) else 'not '}pinned",
                next_step="use --force: engines keep what they have mapped, and cannot resume",
            )
