"""One change of the weights on this rank: other weights are made beside those that are served, verified, put into the
vault, and then wait for the leader's decision, as long as it takes.

Owns the order of these, what a change that failed leaves behind (nothing: what is served was never touched), and
carrying out a decision. The rules of the protocol are ``protocol/transaction.py``'s, what is written down is
``change_custody.py``'s, and where a decision is read is ``following.py``'s. Used on the event loop.

    preparing ──► prepared ──► committed       the state is ``updating`` while a change is preparing, and ``ready``
        │             └──────► aborted         before and after
        └► failed, aborted
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.freeing import Freeing
from weightcached.daemon.generation import Generation
from weightcached.daemon.loading import ServedAlready
from weightcached.daemon.making import Make, Making
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.publishing import Publishing
from weightcached.daemon.record import Record
from weightcached.daemon.refusals import unexpected
from weightcached.daemon.state_record import PreparedRecord
from weightcached.daemon.states import SERVING, State
from weightcached.protocol.control import ChangeInfo, FromCheckpoint, FromHeld, FromTrainer, Prepare
from weightcached.protocol.errors import (
    DaemonDraining,
    DaemonFailed,
    DaemonNotReady,
    GenerationGone,
    HolderDied,
    InternalError,
    StageLost,
    UpdateConflict,
    WeightCacheError,
)
from weightcached.protocol.messages import shortened
from weightcached.protocol.transaction import (
    Action,
    Decision,
    Held,
    Ledger,
    Outcome,
    Prepared,
    action,
    require_may_prepare,
)

log = logging.getLogger(__name__)


class Changing:
    """Made by the keeper once something is served (:meth:`restore` says what was prepared), and ended by it."""

    def __init__(
        self,
        record: Record,
        changes: ChangeCustody,
        publishing: Publishing,
        freeing: Freeing,
        making: Making,
        give_up: Callable[[str], Awaitable[None]],
    ) -> None:
        """``give_up`` a transaction: has the leader write down that it is aborted, where this is the leader."""
        self._record = record
        self._changes = changes
        self._publishing = publishing
        self._freeing = freeing
        self._making = making
        self._give_up = give_up
        self._task: asyncio.Task[None] | None = None
        self._told_to_end: asyncio.Task[None] | None = None
        self._pushed: tuple[FromTrainer, asyncio.Future[Make]] | None = None
        self.info: ChangeInfo | None = None
        """The change that is worked at, or is prepared, or ended last."""

    # What is there

    @property
    def prepared(self) -> Prepared | None:
        """What is held, finished, for a change whose decision was not read."""
        waiting = self._changes.prepared
        held = self._record.generations.get(waiting.generation) if waiting is not None else None
        if waiting is None or held is None:
            return None
        return Prepared(waiting.transaction, Held(waiting.generation, held.generation.versions))

    def restore(self) -> None:
        """Take up what the keeper before this one had prepared, if it is held."""
        waiting = self._changes.prepared
        if waiting is None or self.prepared is None:
            return
        self._record.generations.prepared = waiting.generation
        self.info = ChangeInfo(
            transaction=waiting.transaction, state="prepared", generation=waiting.generation, leader=waiting.leader
        )

    def require_serving(self) -> Generation:
        """What is served. Raises why nothing is, or will be."""
        record = self._record
        if record.state in (State.DRAINING, State.STOPPED):
            raise DaemonDraining("the daemon is stopping", next_step="ask the daemon that is started next")
        if record.state is State.FAILED:
            raise DaemonFailed("the daemon has no weights to change", found=str(record.last_error))
        if record.published is None or record.state not in SERVING:
            raise DaemonNotReady("the daemon has not published its weights yet", found=f"state {record.state}")
        return record.published.generation

    # Preparing

    def prepare(self, asked: Prepare) -> None:
        """Begin, unless this change has begun already. Raises UpdateConflict, InsufficientMemory where the
        state record has no room for it, or why nothing is served here.
        """
        if self.info is not None and self.info.transaction == asked.transaction:
            return
        current = self.require_serving()
        if self._task is not None and not self._task.done():
            raise UpdateConflict(
                "this rank prepares another change",
                expected="none that is under way",
                found=f"transaction {self.info.transaction if self.info is not None else None}",
            )
        held = Held(current.id, current.versions)
        require_may_prepare(asked.transaction, base=asked.base, current=held, prepared=self.prepared)
        self._changes.require_room()
        self.info = ChangeInfo(transaction=asked.transaction, state="preparing", leader=asked.leader)
        self._pushed = None
        if isinstance(asked.source, FromTrainer):
            self._pushed = asked.source, asyncio.get_running_loop().create_future()
        log.info("change", extra={"transaction": asked.transaction, "change": "preparing", "source": asked.source.kind})
        self._record.machine.move(State.UPDATING)
        self._record.events.say("change")
        self._task = asyncio.create_task(self._run(asked), name="prepare a change")

    def expected_push(self, transaction: str) -> FromTrainer:
        """What a trainer may begin to push now. Raises UpdateConflict where that change does not wait for it."""
        if self._pushed is None or self.info is None or self.info.transaction != transaction or self._pushed[1].done():
            raise UpdateConflict(
                "no change waits for these weights to be pushed",
                expected="a transaction that was prepared with source `trainer`, and not begun",
                found=f"transaction {transaction}",
                next_step="begin the change at every rank first",
            )
        return self._pushed[0]

    def prepare_with(self, transaction: str, make: Make) -> Coroutine[Any, Any, ChangeInfo]:
        """From the call on, have ``make`` make the weights of a change that waits for a trainer; awaited, how it ended:
        ``prepared``, ``failed`` or ``aborted``. ``make`` is cancelled where the change is aborted. Raises
        UpdateConflict as :meth:`expected_push`.
        """
        self.expected_push(transaction)
        if self._pushed is None or self._task is None:
            raise InternalError("a change that waits for a trainer has no task")
        self._pushed[1].set_result(make)
        return self._end_of(self._task)

    async def _end_of(self, task: asyncio.Task[None]) -> ChangeInfo:
        await asyncio.wait({task})
        if self.info is None:
            raise InternalError("a change has ended without a trace")
        return self.info

    async def decided(self, transaction: str) -> None:
        """Returns once that change does not wait for a decision here, or waits no longer."""
        while self.info is not None and (self.info.transaction, self.info.state) == (transaction, "prepared"):
            await self._record.changes.wait()

    async def _run(self, asked: Prepare) -> None:
        try:
            await self._prepare(asked)
        except asyncio.CancelledError:
            self._ended("aborted")
            raise
        except StageLost as error:
            self._fail(error)
            await self._give_up(asked.transaction)  # whoever began it is gone
        except WeightCacheError as error:
            self._fail(error)
        except Exception as error:
            log.exception("a change met an error of ours")
            self._fail(unexpected(error))
        finally:
            self._settle()

    def _settle(self) -> None:
        """Nothing is being prepared any more."""
        self._pushed = None
        self._record.progress.update("ready")
        if self._record.state is State.UPDATING:
            self._record.machine.move(State.READY)

    async def _prepare(self, asked: Prepare) -> None:
        source, served = asked.source, self.require_serving()
        if isinstance(source, FromHeld):
            waiting = self._held(asked, self._of_versions(source.versions))
        else:
            try:
                made = await self._made(source, served)
            except ServedAlready:
                log.info("served already", extra={"generation": served.id})
                waiting = self._held(asked, served)
            else:
                waiting = await self._entrusted(asked, made, served)
        self._record.generations.prepared = waiting.generation
        self._ended("prepared", generation=waiting.generation)

    def _of_versions(self, versions: Sequence[str]) -> Generation:
        """The generation that is held and has one of these."""
        found = next(filter(None, map(self._record.generations.of_version, versions)), None)
        if found is None:
            raise GenerationGone(
                "no generation of this version is held here",
                expected=" or ".join(dict.fromkeys(versions)),
                found=", ".join(one.generation.version for one in self._record.generations.granted),
                next_step="update to its checkpoint instead",
            )
        return found.generation

    def _held(self, asked: Prepare, generation: Generation) -> PreparedRecord:
        """Prepared without being made: it is held already."""
        waiting = _waiting(asked, generation)
        self._changes.prepare_held(waiting)
        return waiting

    async def _entrusted(self, asked: Prepare, made: Generation, served: Generation) -> PreparedRecord:
        """Prepared: verified, and in the vault. What was made is freed where that fails."""
        waiting = _waiting(asked, made)
        try:
            made = await self._making.checked(made, served)
            await self._making.entrust(made, waiting)
            self._publishing.hold(made, ProvenReceipts(), staged=True)
        except BaseException:
            await made.free()
            raise
        return waiting

    async def _made(self, source: FromCheckpoint | FromTrainer, served: Generation) -> Generation:
        if isinstance(source, FromCheckpoint):
            return await self._making.loaded(source, served)
        if self._pushed is None:
            raise InternalError("a change without a source")
        return await self._making.pushed(self._pushed[1])

    def _fail(self, error: WeightCacheError) -> None:
        log.error("the change failed", extra={"code": error.code, "reason": str(error)})
        self._ended("failed", error=error)

    def _ended(self, state: str, *, generation: str | None = None, error: WeightCacheError | None = None) -> None:
        if self.info is None:
            raise InternalError("a change that is not known has ended")
        known = {
            "transaction": self.info.transaction,
            "leader": self.info.leader,
            "state": state,
            "generation": generation,
            "error_code": error.code if error is not None else None,
            "error": shortened(str(error)) if error is not None else None,
        }
        self.info = ChangeInfo.model_validate(known)
        log.info("change", extra={"transaction": self.info.transaction, "change": state, "generation": generation})
        self._record.events.say("change", self.info.error or "")
        self._record.changes.announce()

    # Deciding

    async def act(self, decision: Decision) -> None:
        """What the leader's record says about a change: switch, drop, or go on waiting. Nothing happens for a change
        that is not under way here. Raises UpdateConflict where the leader committed another version than is prepared.
        """
        prepared = self.prepared
        if prepared is None or prepared.transaction != decision.transaction:
            # What is committed was prepared everywhere: a command that came late has it made here once more.
            if decision.outcome not in (Outcome.OPEN, Outcome.UNKNOWN):
                await self._stop_preparing(decision.transaction)
            return
        try:
            todo = action(prepared, decision)
        except UpdateConflict as error:
            self._record.last_error = error
            raise
        if todo is Action.SWITCH:
            self.commit(prepared.transaction, None)
        elif todo is Action.DROP:
            await self.abort(prepared.transaction, None)

    def commit(self, transaction: str, ledger: Ledger | None) -> None:
        """Serve what is prepared from now on. With the leader's new ``ledger`` that is the decision, in one write."""
        waiting = self._changes.prepared
        if waiting is None or waiting.transaction != transaction:
            raise InternalError("a change that is not prepared cannot be committed", found=transaction)
        self._changes.commit(waiting, ledger)
        generations = self._record.generations
        generations.prepared = None
        generations.keep = self._record.options.keep_generations if waiting.keep is None else waiting.keep
        self._record.last_error = None  # it was about what was served until now
        self._publishing.switch(waiting.generation)
        self._ended("committed", generation=waiting.generation)
        self._freeing.wake()

    async def abort(self, transaction: str, ledger: Ledger | None) -> None:
        """Give up that change, whether it is prepared, preparing, or unknown here. With the leader's new ``ledger``
        that is the decision.
        """
        waiting = self._changes.prepared
        if waiting is None or waiting.transaction != transaction:
            if ledger is not None:
                self._changes.write_ledger(ledger)
            await self._stop_preparing(transaction)
            return
        self._changes.abort(ledger)
        self._record.generations.prepared = None
        self._ended("aborted")
        held = self._record.generations.get(waiting.generation)
        if held is not None and held.staged:
            await self._freeing.drop(waiting.generation, reason="its change was aborted")
        self._freeing.wake()

    async def lose(self, generation_id: str, error: HolderDied) -> None:
        """The memory of one that is not current is gone: it is granted to nobody from the call on. A change that had
        prepared it has failed, whatever the leader decides.
        """
        waiting = self._changes.prepared
        if waiting is not None and waiting.generation == generation_id:
            self._changes.abort(None)
            self._record.generations.prepared = None
            self._fail(error)
        await self._freeing.drop(generation_id, reason=str(error))

    async def _stop_preparing(self, transaction: str) -> None:
        if self.info is not None and (self.info.transaction, self.info.state) == (transaction, "preparing"):
            await self.stop()

    async def stop(self) -> None:
        """End the preparing of a change; what is prepared stays so. Safe to call twice, and before the first has
        returned.
        """
        task = self._task
        if task is None:
            return
        if self._told_to_end is not task:  # told again, it would leave what it is putting away where it lies
            self._told_to_end = task
            task.cancel()
        await asyncio.wait({task})
        if task is self._task and self.info is not None and self.info.state == "preparing":
            self._ended("aborted")  # it had not begun, and could not say so itself
            self._settle()


def _waiting(asked: Prepare, generation: Generation) -> PreparedRecord:
    return PreparedRecord(
        transaction=asked.transaction, generation=generation.id, leader=asked.leader, keep=asked.keep_previous
    )
