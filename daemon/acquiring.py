"""How the keeper comes by a generation: it adopts what a vault handed back, or it loads.

Owns the order of attempts, with their reasons; what is refused for good leaves the vault here. Publishes nothing. The
checks of what came back are ``adoption.py``'s, one attempt to load is ``loading.py``'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from weightcached.daemon.adoption import Whole, examine, require_same_config, with_options
from weightcached.daemon.custody import Custody
from weightcached.daemon.digesting import compute
from weightcached.daemon.finding import CONFIG_TIMEOUT_S, Finding
from weightcached.daemon.generation import Generation, Origin
from weightcached.daemon.loading import LoadRequest, load
from weightcached.daemon.lost import loses_what_was_served, require_nothing_lost
from weightcached.daemon.patience import in_thread
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.record import Record
from weightcached.daemon.reproving import Contradicted, Proven, compare
from weightcached.daemon.states import State
from weightcached.daemon.text import binary_size
from weightcached.daemon.verifying import verify
from weightcached.daemon.worker_process import TransientFailure
from weightcached.protocol.config import CacheConfig, Provenance, provenance_of
from weightcached.protocol.errors import (
    CheckpointUnproven,
    ContractError,
    EngineFailed,
    InsufficientMemory,
    InvalidOption,
    ModelConfigError,
    TransferError,
    WeightCacheError,
)
from weightcached.protocol.memory.kinds import kind_of

RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Pauses before loading again after a transient failure; then the failure stands."""
ENGINE_KEY_TIMEOUT_S = 120.0
"""For the key of the engine whose layout is here already: it has to be imported, which takes its time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """``unproven`` says why the files they came from were not seen to be the same; ``None`` where they were."""

    generation: Generation
    proven: ProvenReceipts
    unproven: str | None
    staged: bool = False
    """It was never served: a change has prepared it."""


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """The same content at the path that is asked for now: from here on the weights are from there."""

    origin: Origin
    provenance: Provenance
    verdict: Proven

    def applied(self, generation: Generation) -> Generation:
        moved = dataclasses.replace(
            generation, origin=self.origin, provenance=self.provenance, digest=self.verdict.answer.digest
        )
        receipts = self.verdict.receipts
        return moved if receipts is None else moved.with_receipts(receipts)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What is known about the files of weights that are adopted: why they are unproven, or where they were proven."""

    unproven: str | None
    elsewhere: _Elsewhere | None


class Acquiring:
    """Used once, by the keeper. Moves the state to ``adopting`` and ``loading``; never further."""

    def __init__(self, record: Record, custody: Custody) -> None:
        self._record = record
        self._custody = custody
        self._options = record.options
        self._finding = Finding(record)

    # Adopting

    async def adopt(self) -> list[Adopted]:
        """Take over the first generation from the vault that is whole and what was asked for, and with it all others
        that are recorded, whole, and of the same configuration, in the order in which they were served. Nothing if none
        is what was asked for.

        Each that is not is logged with its reason, which also becomes the record's last error. One that is not whole is
        removed from the vault; one that is something else stays there until it is replaced.
        """
        await self._forget_unfinished()
        if not self._custody.candidates:
            return []
        self._record.machine.move(State.ADOPTING)
        self._record.progress.update("adopt")
        adopted: list[Adopted] = []
        try:
            for generation_id in self._in_order():
                if loses_what_was_served(self._custody, self._options.model):
                    break
                if (current := await self._try(generation_id)) is not None:
                    adopted = [current, *await self._others(current.generation.config)]
                    break
        except asyncio.CancelledError:
            self._custody.attempt_ended()  # we are told to stop, which says nothing about the weights
            raise
        # An error of ours does not come by here, no more than a kill: those are the attempts that count.
        self._custody.attempt_ended()
        return adopted

    async def _forget_unfinished(self) -> None:
        """What a change had begun to store, and what of one that was prepared has not come back whole: neither can ever
        be decided upon. And what was given up while the vault could not be told."""
        record, candidates = self._custody.record, self._custody.candidates
        prepared = record.prepared.generation if record.prepared is not None else None
        if not self._custody.record_lost:
            for given_up in candidates.keys() - {one.id for one in record.generations}:
                log.warning("what was given up before is removed", extra={"generation": given_up})
                await self._custody.refuse(given_up)
        for one in record.generations:
            if one.staged and one.id != prepared and one.id in candidates:
                log.warning("what a change had not finished is removed", extra={"generation": one.id})
                await self._custody.refuse(one.id)
        if prepared is not None and prepared not in candidates:
            self._refused(prepared, TransferError("what a change had prepared has not come back", expected=prepared))
            await self._custody.refuse(prepared)

    def _in_order(self) -> list[str]:
        """The one that was served first, then those that are recorded, the newest first, then the others; without what
        was never served."""
        recorded = [one.id for one in self._custody.record.generations]
        current = self._custody.record.current
        staged = {one.id for one in self._custody.record.generations if one.staged}
        return sorted(
            (id_ for id_ in self._custody.candidates if id_ not in staged),
            key=lambda id_: (id_ != current, -recorded.index(id_) if id_ in recorded else len(recorded)),
        )

    async def _try(self, generation_id: str) -> Adopted | None:
        try:
            whole = await self._examine(generation_id)
            standing = await self._require_wanted(whole)
            await self._verify_if_told(whole)
        except WeightCacheError as error:
            await self._refuse(generation_id, error)
            return None
        return self._take(whole, standing)

    async def _others(self, config: CacheConfig) -> list[Adopted]:
        """What is held beside the one that is served: earlier ones, and what a change has prepared."""
        adopted = []
        for known in self._custody.record.generations:
            if known.id not in self._custody.candidates:
                continue
            try:
                whole = await self._examine(known.id)
                require_same_config(whole.config, config)
                await self._verify_if_told(whole)
            except WeightCacheError as error:
                await self._refuse(known.id, error)
                continue
            generation = whole.generation(
                self._custody.holdings.take, provenance=known.provenance, origin=Origin(known.model_dir, known.hub_id)
            )
            self._custody.adopted(generation, current=False)
            proven = ProvenReceipts(known.proven_receipts)
            adopted.append(Adopted(generation, proven, "the files were not looked at yet", known.staged))
        return adopted

    async def _examine(self, generation_id: str) -> Whole:
        recorded = self._custody.record.generation(generation_id)
        self._custody.examine(generation_id)
        return await examine(generation_id, self._custody.candidates[generation_id], recorded)

    async def _verify_if_told(self, whole: Whole) -> None:
        parts = whole.parts
        if self._options.verify_on_adopt and parts.manifest is not None:
            segments = [parts.segments[number] for number in sorted(parts.segments)]
            await verify(kind_of(whole.config), parts.manifest, segments)

    async def _refuse(self, generation_id: str, error: WeightCacheError) -> None:
        self._refused(generation_id, error)
        if isinstance(error, TransferError):
            await self._custody.refuse(generation_id)

    def _refused(self, generation_id: str, error: WeightCacheError) -> None:
        log.error("not adopted", extra={"generation": generation_id, "code": error.code, "reason": str(error)})
        self._record.last_error = error
        self._record.adoption_refusals[error.code] += 1

    def _take(self, whole: Whole, standing: _Standing) -> Adopted:
        origin = Origin.of(self._options.model)
        nowhere = Provenance(path=origin.model_dir, host=os.uname().nodename)
        generation = whole.generation(self._custody.holdings.take, provenance=nowhere, origin=origin)
        proven = ProvenReceipts(whole.record.proven_receipts if whole.record is not None else ())
        if standing.elsewhere is not None:
            generation = standing.elsewhere.applied(generation)
        if generation.under_model is not None and generation.origin.is_what(self._options.model):
            generation = dataclasses.replace(generation, under_model=None)  # it is what the option says by now
        self._custody.adopted(generation, current=True)
        self._record.config = whole.config
        return Adopted(generation, proven, standing.unproven)

    async def _require_wanted(self, whole: Whole) -> _Standing:
        """Raises the reason why it is not what the options ask for."""
        origin = _origin_of(whole)
        by_change = whole.record is not None and whole.record.under_model == self._options.model
        if origin is not None and not by_change and not origin.is_what(self._options.model):
            return _Standing(None, await self._require_same_content(whole, origin))
        model_dir = Path(origin.model_dir if origin is not None else self._options.model)
        try:
            async with asyncio.timeout(ENGINE_KEY_TIMEOUT_S):
                engine = await self._finding.engine_key(model_dir, whole)
            async with asyncio.timeout(CONFIG_TIMEOUT_S):
                asked = await self._finding.config(model_dir, engine)
        except TimeoutError:
            reason = f"config.json was not read within {CONFIG_TIMEOUT_S:g} s, or the engine's key not computed in time"
        except (ModelConfigError, EngineFailed, InvalidOption, ContractError) as error:  # of the key's process, too
            reason = str(error)
        else:
            require_same_config(whole.config, asked)
            return _Standing("the files were not looked at yet", None)
        log.warning("adopting by the options alone", extra={"reason": reason})
        asked = with_options(whole.config, self._options, self._record.known_memory)
        require_same_config(whole.config, asked)
        return _Standing(reason, None)

    async def _require_same_content(self, whole: Whole, origin: Origin) -> _Elsewhere:
        """Another checkpoint was asked for than the one that is here: only its content can say that it is the same."""
        self._record.progress.update("prove")
        asked = await self._finding.origin()
        model_dir = Path(asked.model_dir)
        require_same_config(
            whole.config, await self._finding.config(model_dir, await self._finding.engine_key(model_dir))
        )
        provenance = await in_thread(lambda: provenance_of(model_dir))
        answer = await compute(
            asked.model_dir,
            cache_dir=self._options.cache_dir,
            trusted_filesystems=self._options.trusted_filesystems,
        )
        verdict = compare(whole.evidence(origin.model_dir), answer)
        if isinstance(verdict, Proven):
            return _Elsewhere(asked, provenance, verdict)
        if isinstance(verdict, Contradicted):
            raise verdict.error
        raise CheckpointUnproven(
            "the kept weights cannot be shown to be the checkpoint that was asked for, so it is loaded anew",
            expected=asked.model_dir,
            found=f"weights from {origin.model_dir}; {verdict.reason}",
        )

    # Loading

    async def load(self) -> Generation:
        """Find out what to load and load it, again after a pause when a failure was transient. Raises the error that
        stands in the end. The caller owns the generation.
        """
        require_nothing_lost(self._custody, self._options.model)
        request = await self._find_out()
        self._record.machine.move(State.LOADING)
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                return await self._load_once(request)
            except InsufficientMemory as error:
                raise self._beside_kept(error) from error
            except TransientFailure as failure:
                self._record.last_error = failure.cause
                if delay_s is None:
                    raise self._beside_kept(failure.cause) from failure
                log.warning("loading again", extra={"after_s": delay_s, "reason": str(failure.cause)})
                self._record.progress.update(f"wait {delay_s:g} s to load again")
                await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _load_once(self, request: LoadRequest) -> Generation:
        started_s = time.monotonic()
        generation = await load(request, self._record.progress)
        self._record.load_durations.add(time.monotonic() - started_s)
        return generation

    def _beside_kept(self, error: WeightCacheError) -> WeightCacheError:
        """The same; of memory that does not suffice it also says that weights which are not served take some."""
        custody = self._custody
        kept = sum(parts.nbytes for parts in custody.candidates.values())
        kept += sum(one.nbytes for one in custody.quarantined.values())
        if not kept or not isinstance(error, InsufficientMemory):
            return error
        return InsufficientMemory(
            error.message,
            expected=error.expected,
            found=f"{error.found}, beside {binary_size(kept)} of kept weights that are not served",
            where=error.where,
            next_step="give up the kept weights with `weightcached release`, then start the daemon again",
        )

    async def _find_out(self) -> LoadRequest:
        """Which directory, which config. Reads no weight."""
        record, options = self._record, self._options
        record.progress.update("resolve")
        origin = await self._finding.origin()
        request = await self._finding.request(origin, snapshot=options.snapshot)
        record.config = request.config
        record.changes.announce()  # clients of another config need not wait for the load
        log.info("config", extra={"model": origin.model_dir, "fingerprint": request.config.fingerprint})
        return request


def _origin_of(whole: Whole) -> Origin | None:
    return None if whole.record is None else Origin(whole.record.model_dir, whole.record.hub_id)
