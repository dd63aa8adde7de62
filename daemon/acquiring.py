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
from weightcached.daemon.children import Child, parent_arguments
from weightcached.daemon.custody import Custody
from weightcached.daemon.digesting import compute, remembered
from weightcached.daemon.engine_keys import ask_for_key, inputs_of
from weightcached.daemon.generation import Generation, Origin
from weightcached.daemon.loading import LoadRequest, TransientFailure, load
from weightcached.daemon.patience import in_thread
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.record import Record
from weightcached.daemon.reproving import Contradicted, Proven, compare
from weightcached.daemon.states import State
from weightcached.daemon.text import binary_size
from weightcached.protocol.config import CacheConfig, Provenance, build_config, provenance_of
from weightcached.protocol.engine_key import EngineKey
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
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import kind_of

HUB_MODULE = "weightcached.protocol.hub"
VERIFY_MODULE = "weightcached.loader.verify"
RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Pauses before loading again after a transient failure; then the failure stands."""
CONFIG_TIMEOUT_S = 1.0
"""For reading ``config.json`` of weights that are here already: longer than that, and it counts as unreadable."""
ENGINE_KEY_TIMEOUT_S = 120.0
"""For the key of the engine whose layout is here already: it has to be imported, which takes its time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """``unproven`` says why the files they came from were not seen to be the same; ``None`` where they were."""

    generation: Generation
    proven: ProvenReceipts
    unproven: str | None


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

    # Adopting

    async def adopt(self) -> Adopted | None:
        """Take over the first generation from the vault that is whole and what was asked for; ``None`` if none is.

        Each that is not is logged with its reason, which also becomes the record's last error. One that is not whole is
        removed from the vault; one that is something else stays there until it is replaced.
        """
        if not self._custody.candidates:
            return None
        self._record.machine.move(State.ADOPTING)
        self._record.progress.update("adopt")
        adopted = None
        try:
            for generation_id in self._in_order():
                if (adopted := await self._try(generation_id)) is not None:
                    break
        except asyncio.CancelledError:
            self._custody.attempt_ended()  # we are told to stop, which says nothing about the weights
            raise
        # An error of ours does not come by here, no more than a kill: those are the attempts that count.
        self._custody.attempt_ended()
        return adopted

    def _in_order(self) -> list[str]:
        """The one that was served first, then those that are recorded, the newest first, then the others."""
        recorded = [one.id for one in self._custody.record.generations]
        current = self._custody.record.current
        return sorted(
            self._custody.candidates,
            key=lambda id_: (id_ != current, -recorded.index(id_) if id_ in recorded else len(recorded)),
        )

    async def _try(self, generation_id: str) -> Adopted | None:
        custody = self._custody
        try:
            recorded = custody.record.generation(generation_id)
            whole = await examine(generation_id, custody.candidates[generation_id], recorded)
            standing = await self._require_wanted(whole)
            if self._options.verify_on_adopt:
                await _verify(whole)
        except WeightCacheError as error:
            log.error("not adopted", extra={"generation": generation_id, "code": error.code, "reason": str(error)})
            self._record.last_error = error
            self._record.adoption_refusals[error.code] += 1
            if isinstance(error, TransferError):
                await custody.refuse(generation_id)
            return None
        return self._take(whole, standing)

    def _take(self, whole: Whole, standing: _Standing) -> Adopted:
        origin = Origin.of(self._options.model)
        nowhere = Provenance(path=origin.model_dir, host=os.uname().nodename)
        generation = whole.generation(self._custody.holdings.take, provenance=nowhere, origin=origin)
        proven = ProvenReceipts(whole.record.proven_receipts if whole.record is not None else ())
        if standing.elsewhere is not None:
            generation = standing.elsewhere.applied(generation)
        self._custody.adopted(generation)
        self._record.config = whole.config
        self._record.model_path = generation.origin.model_dir
        return Adopted(generation, proven, standing.unproven)

    async def _require_wanted(self, whole: Whole) -> _Standing:
        """Raises the reason why it is not what the options ask for."""
        origin = _origin_of(whole)
        if origin is not None and not origin.is_what(self._options.model):
            return _Standing(None, await self._require_same_content(whole, origin))
        model_dir = Path(origin.model_dir if origin is not None else self._options.model)
        try:
            async with asyncio.timeout(ENGINE_KEY_TIMEOUT_S):
                engine = await self._engine_key(model_dir, whole)
            async with asyncio.timeout(CONFIG_TIMEOUT_S):
                asked = await self._read_config(model_dir, engine)
        except TimeoutError:
            reason = f"config.json was not read within {CONFIG_TIMEOUT_S:g} s, or the engine's key not computed in time"
        except (ModelConfigError, EngineFailed, InvalidOption, ContractError) as error:  # of the key's process, too
            reason = str(error)
        else:
            require_same_config(whole.config, asked)
            return _Standing("the files were not looked at yet", None)
        log.warning("adopting by the options alone", extra={"reason": reason})
        require_same_config(whole.config, with_options(whole.config, self._options))
        return _Standing(reason, None)

    async def _require_same_content(self, whole: Whole, origin: Origin) -> _Elsewhere:
        """Another checkpoint was asked for than the one that is here: only its content can say that it is the same."""
        self._record.progress.update("prove")
        asked = await self._origin()
        model_dir = Path(asked.model_dir)
        require_same_config(whole.config, await self._read_config(model_dir, await self._engine_key(model_dir)))
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
        origin = await self._origin()
        record.model_path = origin.model_dir
        model_dir = Path(origin.model_dir)
        inputs = None if options.engine is None else await in_thread(lambda: inputs_of(options, model_dir))
        engine = await self._engine_key(model_dir)
        config = await self._read_config(model_dir, engine)
        provenance = await in_thread(lambda: provenance_of(model_dir))
        record.config = config
        record.changes.announce()  # clients of another config need not wait for the load
        log.info("config", extra={"model": origin.model_dir, "fingerprint": config.fingerprint})
        return LoadRequest(
            origin=origin,
            config=config,
            provenance=provenance,
            trusted_filesystems=options.trusted_filesystems,
            known_digest=lambda receipts: remembered(receipts, options.cache_dir),
            snapshot=options.snapshot,
            strategy=options.load_strategy,
            engine_arguments=options.engine_arguments,
            engine_inputs=inputs,
        )

    async def _origin(self) -> Origin:
        """The checkpoint's directory. A hub id is resolved in a process of its own, so that its libraries stay out of
        here.
        """
        model = self._options.model
        if await in_thread(Path(model).is_dir):
            return Origin.of(model)
        child = await Child.start("hub", HUB_MODULE, [*parent_arguments(), "--", model], answers=True)
        try:
            answer = await child.answer()
        finally:
            await child.end()
        if not isinstance(answer.get("path"), str):
            raise ContractError("the hub process answered without a path", found=sorted(answer))
        return Origin.of(answer["path"], hub_id=model)

    async def _engine_key(self, model_dir: Path, kept: Whole | None = None) -> EngineKey | None:
        """Of the engine whose layout is asked for; the one of what is ``kept``, where nothing has changed since that
        could change it.
        """
        options = self._options
        if options.engine is None:
            return None
        if kept is not None and kept.record is not None and kept.record.engine_inputs is not None:
            async with asyncio.timeout(CONFIG_TIMEOUT_S):
                inputs = await in_thread(lambda: inputs_of(options, model_dir))
            if inputs == kept.record.engine_inputs and kept.config.layout == options.engine:
                return EngineKey.of(options.engine, kept.config.layout_revision, kept.config.engine or {})
        self._record.progress.update(f"ask engine {options.engine} for its key"[:200])
        return await ask_for_key(options.engine, options, model_dir)

    async def _read_config(self, model_dir: Path, engine: EngineKey | None) -> CacheConfig:
        options = self._options
        return await in_thread(
            lambda: build_config(
                model_dir,
                layout=options.layout,
                dtype=options.dtype,
                quantization=options.quantization,
                engine=engine,
                memory=options.memory,
                device=options.device,
                **options.parallel.model_dump(),
            )
        )


def _origin_of(whole: Whole) -> Origin | None:
    return None if whole.record is None else Origin(whole.record.model_dir, whole.record.hub_id)


async def _verify(whole: Whole) -> None:
    """Have every resident byte hashed by another process. Raises TransferError when one is not what was published."""
    parts = whole.parts
    if parts.manifest is None:
        raise ValueError("a generation without a manifest is not whole")
    with OwnedFds() as fds:
        fds.append(host.export(parts.manifest))
        for number in sorted(parts.segments):
            fds.append(kind_of(whole.config).export(parts.segments[number]))
        passed = [fds[position] for position in range(len(fds))]
        arguments = ["--manifest", str(passed[0]), *(f"--segment={fd}" for fd in passed[1:]), *parent_arguments()]
        child = await Child.start("verify", VERIFY_MODULE, arguments, pass_fds=passed, answers=True)
        try:
            answer = await child.answer()
        finally:
            await child.end()
    if answer.get("differing_count") != 0:
        raise TransferError(
            "resident bytes are not those that were published",
            expected=f"{answer.get('rows')} parameters as the manifest describes them",
            found=f"{answer.get('differing_count')} that differ: {', '.join(map(str, answer.get('differing') or ()))}",
        )
    log.info("verified", extra={key: answer.get(key) for key in ("rows", "nbytes", "seconds")})
