"""Custody of what outlives the keeper: the vault, the state record in it, and what came back from it at the start.

Owns changing the two together, in an order that leaves something usable whenever the keeper is killed: a generation is
recorded before it is stored, becomes current after all of it is kept, and loses its record after it was removed.
Adoption attempts are counted here, before anything that could fail is done with what came back. What is adopted,
published or dropped is decided elsewhere; called by the keeper and its helpers only, on the event loop. What a change
writes is ``change_custody.py``'s.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from weightcached.daemon.claim import Claim
from weightcached.daemon.generation import Generation
from weightcached.daemon.holdings import LISTENER_NAME, STATE_NAME, Holdings, Parts, stored_names
from weightcached.daemon.kept_state import opened_state, record_of
from weightcached.daemon.listen_fds import HandedOver
from weightcached.daemon.state_record import PROVEN_MAX, BoundSocket, GenerationRecord, StateFile, StateRecord
from weightcached.daemon.vault import Keeping, Vault
from weightcached.protocol.errors import InsufficientMemory, InternalError

ATTEMPTS_MAX = 3
"""Adoptions that may fail in a row (the keeper was killed, or crashed); then what was looked at is quarantined."""
DECISION_NBYTES = 16 * 1024
"""Of the state record: what is kept for saying that a change is prepared, and what was decided."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A generation that stays in the vault and is not looked at any more."""

    names: frozenset[str]
    nbytes: int


class Custody:
    """Made by :meth:`open`. Owns the state's descriptor and, until they are taken, those that came back."""

    def __init__(self, vault: Vault, holdings: Holdings, state: StateFile) -> None:
        self._vault = vault
        self._state = state
        self._names: dict[str, set[str]] = {id_: parts.names for id_, parts in holdings.generations.items()}
        self._listener_names: set[str] = set()
        self.holdings = holdings
        self.candidates: dict[str, Parts] = {}
        """Generations that came back and may be adopted."""
        self.quarantined: dict[str, Quarantined] = {}
        self._keeping: dict[str, Keeping] = {}

    @classmethod
    async def open(cls, vault: Vault, handed: HandedOver) -> Custody:
        """Take over what was handed over, and count this start in the state. Raises nothing for whatever came."""
        holdings = Holdings.of(handed)
        state = await opened_state(vault, holdings)
        custody = cls(vault, holdings, state)
        custody._count_start()
        await custody._remove_strangers()
        return custody

    @property
    def record(self) -> StateRecord:
        return self._state.record

    @property
    def vault_id(self) -> str:
        """Of the state record."""
        if self.record.vault_id is None:
            raise InternalError("the state record was used before it was taken over")
        return self.record.vault_id

    def keeping(self, generation_id: str | None) -> Keeping:
        """How that generation is kept."""
        nothing = Keeping("none", "nothing is in the vault yet")
        return nothing if generation_id is None else self._keeping.get(generation_id, nothing)

    @property
    def lost(self) -> GenerationRecord | None:
        """What was served last, where it has not come back or was refused for good: remembered until something else is
        held."""
        current = self.record.current
        return None if current is None or current in self.candidates else self.record.generation(current)

    @property
    def record_lost(self) -> bool:
        """Whether the state has not come back, for us or for a keeper before us that has served nothing: nothing says
        what the generations that did were to each other."""
        return self.record.after_loss

    @property
    def outlives_stop(self) -> bool:
        """Whether weights are (or may be) still kept when this process has stopped cleanly."""
        kept = any(one.state in ("kept", "unproven") for one in self._keeping.values())
        weights = kept or bool(self.candidates or self.quarantined)
        return self._vault.outlives_stop and weights

    def _count_start(self) -> None:
        record = self._state.record
        came = self.holdings.generations
        for one in record.generations:
            if one.id in came:
                came[one.id].recorded_nbytes = one.resident_nbytes
        quarantined = [id_ for id_ in record.quarantined if id_ in came]
        fresh = [id_ for id_ in came if id_ not in quarantined]
        attempts, examining = record.adoption_attempts, record.examining
        if fresh and attempts >= ATTEMPTS_MAX:
            # Where none had been looked at it may be any of them.
            suspects = [record.examining] if record.examining in fresh else fresh
            log.error("quarantined: adoption failed too often", extra={"generations": suspects, "attempts": attempts})
            quarantined, fresh = [*quarantined, *suspects], [id_ for id_ in fresh if id_ not in suspects]
            attempts, examining = 0, None
        if fresh:
            attempts += 1
        self.change(
            vault_id=record.vault_id or secrets.token_hex(16),
            after_loss=record.after_loss or (record.vault_id is None and bool(came)),
            starts=record.starts + 1,
            adoption_attempts=attempts,
            examining=examining,
            quarantined=tuple(quarantined),
            generations=tuple(one for one in record.generations if one.id in came or one.id == record.current),
        )
        self.candidates = {id_: came[id_] for id_ in fresh}
        self.quarantined = {id_: Quarantined(frozenset(came[id_].names), came[id_].nbytes) for id_ in quarantined}
        # What is quarantined stays where it is kept; nobody has to hold it here.
        for parts in (came[id_] for id_ in quarantined):
            for fd in parts.fds:
                os.close(self.holdings.take(fd))

    async def _remove_strangers(self) -> None:
        """Forget what is no part of anything, unless something of ours has the same name."""
        strangers = self.holdings.strangers
        if not strangers:
            return
        ours = {name for name, _ in (*self.holdings.listeners, *self.holdings.states)}.union(*self._names.values())
        log.warning("the vault held what is not ours", extra={"names": sorted({name for name, _ in strangers})})
        for _, fd in strangers:
            os.close(self.holdings.take(fd))
        await self._vault.forget({name for name, _ in strangers} - ours)

    # The listener

    async def listen(self, claim: Claim, *, mode: int) -> socket.socket:
        """The listening socket: the one that was kept, where it is behind the place's socket file, else a new one.

        The caller owns it. Raises what :meth:`Claim.listen` raises.
        """
        bound = self.record.bound
        came = [(name, socket.socket(fileno=self.holdings.take(fd))) for name, fd in self.holdings.listeners]
        self._listener_names = {name for name, _ in came}
        if len(came) == 1 and bound is not None:
            [(_, kept)] = came
            if claim.adopt(kept, device=bound.device, inode=bound.inode, mode=mode):
                return kept
        for _, other in came:
            other.close()
        # One that is not behind the path must be gone before anybody asks who listens there: it might be us.
        await self.give_up_listener()
        listener = claim.listen(mode=mode)
        device, inode = claim.bound
        self.change(bound=BoundSocket(device=device, inode=inode))
        self._listener_names = {LISTENER_NAME}
        await self._vault.store([(LISTENER_NAME, listener.fileno())])
        return listener

    async def give_up_listener(self) -> None:
        """From now on nobody but us holds it: once it is closed here, clients are refused."""
        if self._listener_names:
            await self._vault.forget(sorted(self._listener_names))
        self._listener_names = set()

    # Generations

    async def entrust(self, generation: Generation) -> None:
        """Put a generation into the vault, whole or not at all, and make it current."""
        keeping = await self.store(generation)
        if keeping.state == "dropped" and self.candidates:
            await self.retire()  # there may be room for one only, and this one replaces the others
            keeping = await self.store(generation)
        if keeping.state not in ("dropped", "none"):
            self.change(current=generation.id, after_loss=False)

    async def store(self, generation: Generation, *, staged: bool = False) -> Keeping:
        """Record a generation and put it into the vault, whole or not at all; says how it is kept.

        Memory that dies with its holder is no vault's to keep. Raises InsufficientMemory, and has done nothing, where
        the record has no room for it, or for the decision that follows.
        """
        if generation.kind.dies_with_holder:
            keeping = self._keeping[generation.id] = Keeping(
                "none", f"memory of kind {generation.config.memory} dies with the daemon"
            )
            return keeping
        names = stored_names(generation.id, segments=len(generation.segments_nbytes))
        fds = [generation.memory[position] for position in (*range(1, 1 + len(generation.segments_nbytes)), 0)]
        recorded = record_of(generation).model_copy(update={"staged": staged})
        generations = (*self.record.generations, recorded)
        self.require_room(nbytes=DECISION_NBYTES if staged else 0, generations=generations)
        self.change(generations=generations)
        self._names[generation.id] = set(names)
        try:
            keeping = await self._vault.keep(list(zip(names, fds, strict=True)))
        except BaseException:
            await self.forget([generation.id])
            raise
        if keeping.state in ("dropped", "none"):
            await self.forget([generation.id])
        self._keeping[generation.id] = keeping
        log.info("entrusted", extra={"generation": generation.id, "vault": keeping.state})
        return keeping

    def adopted(self, generation: Generation, *, current: bool) -> None:
        """It is held again: the attempt has succeeded. It stays where it is kept."""
        record = self.record
        del self.candidates[generation.id]
        self._keeping[generation.id] = Keeping("kept")
        known = record.generation(generation.id)
        recorded = record_of(generation, known)
        others = tuple(recorded if one.id == generation.id else one for one in record.generations)
        generations = others if known is not None else (*others, recorded)
        if current:
            adoptions = record.adoptions + 1
            self.change(generations=generations, current=generation.id, adoptions=adoptions, after_loss=False)
        else:
            self.change(generations=generations)

    def examine(self, generation_id: str) -> None:
        """Say which one is looked at from now on, before anything that could fail is done with it."""
        if self.record.examining != generation_id:
            self.change(examining=generation_id)

    def attempt_ended(self) -> None:
        """Adopted, refused for a reason, or told to stop: it was no failure of the kind that is counted."""
        self.change(adoption_attempts=0, examining=None)

    async def refuse(self, generation_id: str) -> None:
        """Remove what came back and can never be adopted. That it was served last is remembered."""
        await self.forget([generation_id], remembering=self.record.current)

    async def retire(self) -> None:
        """Remove every candidate, and the memory of what was lost: something else is held now."""
        held = {*self._names, self.record.current}
        lost = [one.id for one in self.record.generations if one.id not in held]
        await self.forget([*self.candidates, *lost])

    async def release_quarantined(self) -> int:
        """Remove what is quarantined; how many generations that were."""
        ids = list(self.quarantined)
        await self.forget(ids)
        return len(ids)

    async def forget(self, ids: Iterable[str], *, remembering: str | None = None) -> None:
        """Remove generations from the vault, and then from the record, which goes on ``remembering`` that one.
        Descriptors that are ours stay ours.
        """
        ids = list(ids)
        names = set[str]().union(*(self._names.get(id_, set()) for id_ in ids))
        if names:
            await self._vault.forget(sorted(names))
        for id_ in ids:
            self._names.pop(id_, None)
            self.quarantined.pop(id_, None)
            self._keeping.pop(id_, None)
            if (parts := self.candidates.pop(id_, None)) is not None:
                for fd in parts.fds:
                    os.close(self.holdings.take(fd))
        record = self.record
        ids = [id_ for id_ in ids if id_ != remembering]
        self.change(
            generations=tuple(one for one in record.generations if one.id not in ids),
            quarantined=tuple(id_ for id_ in record.quarantined if id_ not in ids),
            pins=tuple(id_ for id_ in record.pins if id_ not in ids),
            current=None if record.current in ids else record.current,
            prepared=None if record.prepared is not None and record.prepared.generation in ids else record.prepared,
        )

    def learned(self, generation: Generation, proven_receipts: Iterable[str]) -> None:
        """More is known about a generation that is in the vault (or is not: then nothing happens)."""
        known = self.record.generation(generation.id)
        if known is None:
            return
        newest = tuple(proven_receipts)[-PROVEN_MAX:]
        updated = record_of(generation, known).model_copy(update={"proven_receipts": newest})
        self.change(generations=tuple(updated if one.id == generation.id else one for one in self.record.generations))

    async def empty(self) -> None:
        """Give up everything that is kept: generations, listener, state."""
        await self._vault.forget(sorted({STATE_NAME, *self._listener_names}.union(*self._names.values())))
        self._names.clear()
        self._listener_names.clear()
        self.candidates.clear()
        self.quarantined.clear()
        self._keeping.clear()
        self.holdings.close()

    def close(self) -> None:
        """Close our own descriptors; what is kept stays kept. Safe to call twice."""
        self.holdings.close()
        self._state.close()

    def require_room(self, *, nbytes: int, **changes: object) -> None:
        """Raises InsufficientMemory unless the record with these changes, and without history, leaves ``nbytes``."""
        left = self.record.model_copy(update=changes).without_history().room_nbytes
        if left < nbytes:
            raise InsufficientMemory(
                "the state record has no room for more",
                expected=f"{nbytes} bytes for what follows",
                found=f"{left} bytes beside what is written down of {len(self.record.generations)} generations",
                next_step="`weightcached generations` shows what is held; unpin or drop what is not needed",
            )

    def change(self, **changes: object) -> None:
        """Write the record anew with these fields: one write, which is there whole or not at all. For custody's own.

        History makes room where there is none. Raises InsufficientMemory where that does not suffice; a decision always
        fits, because room was kept for it (:meth:`require_room`).
        """
        record = self.record.model_copy(update=changes)
        if record.room_nbytes < 0:
            log.warning("foreign receipts, and what was aborted before, are not remembered any more")
            self.require_room(nbytes=0, **changes)
            record = record.without_history()
        self._state.write(record)
