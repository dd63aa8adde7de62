"""The keeper: one daemon's life from its claim on a place to the last connection, in order.

Owns moving the states, loading with its retries, publishing, and stopping; it is the only one that writes the record.
What it starts it ends: worker, digest, server, descriptors, socket file. It has no torch and maps no segment.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
from pathlib import Path

from weightcached.daemon.children import Child, parent_arguments
from weightcached.daemon.claim import Claim
from weightcached.daemon.digesting import Digesting, remembered
from weightcached.daemon.generation import Generation
from weightcached.daemon.loading import LoadRequest, TransientFailure, load
from weightcached.daemon.options import ServeOptions
from weightcached.daemon.progress import Changes, ProgressTracker, display_for
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.record import Published, Record
from weightcached.daemon.server import Server
from weightcached.daemon.states import IllegalTransition, State, StateMachine
from weightcached.protocol.config import CacheConfig, Provenance, build_config, provenance_of
from weightcached.protocol.errors import ContractError, InternalError, WeightCacheError

HUB_MODULE = "weightcached.protocol.hub"
RETRY_DELAYS_S = (1.0, 2.0, 4.0)
"""Pauses before loading again after a transient failure; then the failure stands."""

_OWN_SOCKET_MODE = stat.S_IRUSR | stat.S_IWUSR
_SHARED_SOCKET_MODE = 0o666  # whom to serve is decided by peer credentials, which no mode bits can express

log = logging.getLogger(__name__)


class Keeper:
    """Serves ``claim``'s place. :meth:`run` once; the claim is released by whoever took it."""

    def __init__(self, options: ServeOptions, claim: Claim) -> None:
        changes = Changes()

        def changed(state: State) -> None:
            log.info("state", extra={"state": state.value})
            changes.announce()

        self._claim = claim
        self._record = Record(
            options=options,
            progress=ProgressTracker(display_for(options.log_format)),
            machine=StateMachine(changed),
            changes=changes,
        )

    async def run(self) -> None:
        """Bind, load, serve until SIGTERM or SIGINT, drain. A second signal drains no longer.

        Raises InvalidPlace or PlaceTaken before anything is served; IllegalTransition for a bug.
        """
        stop = _signals()
        options = self._record.options
        shared = options.allowed.uids or options.allowed.gids
        listener = self._claim.listen(mode=_SHARED_SOCKET_MODE if shared else _OWN_SOCKET_MODE)
        server = Server(listener, self._record)
        server.start()
        log.info("listening", extra={"socket": str(options.place.socket_path)})
        bringing_up = asyncio.create_task(self._bring_up(), name="bring up")
        stopping = asyncio.create_task(stop.acquire(), name="stop signal")
        try:
            await asyncio.wait({bringing_up, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if bringing_up.done():
                bringing_up.result()
                await stopping
        finally:
            self._record.machine.move(State.DRAINING)
            await self._stop(server, bringing_up, stop)

    async def _stop(self, server: Server, bringing_up: asyncio.Task[None], stop: asyncio.Semaphore) -> None:
        record = self._record
        bringing_up.cancel()
        await asyncio.wait({bringing_up})
        if record.published is not None:
            await record.published.digesting.stop()
        draining = asyncio.create_task(server.drain(), name="drain")
        again = asyncio.create_task(stop.acquire(), name="second signal")
        await asyncio.wait(
            {draining, again}, timeout=record.options.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        draining.cancel()
        again.cancel()
        # The weights go before the path does: an absent path says that no weights are cached here.
        if record.published is not None:
            record.published.generation.memory.close()
        self._claim.unlink()
        await server.close()
        record.progress.close()
        record.machine.move(State.STOPPED)

    async def _bring_up(self) -> None:
        """From options to ``ready``, or to ``failed`` with the reason in the record. Raises only for bugs in the
        states.
        """
        record = self._record
        try:
            request = await self._find_out()
            record.machine.move(State.LOADING)
            generation = await self._load(request)
            self._publish(request.model_dir, generation)
        except WeightCacheError as error:
            self._fail(error)
        except IllegalTransition:
            raise
        except Exception as error:
            log.exception("loading met an error of ours")
            self._fail(
                InternalError(
                    "loading met an error that the daemon did not expect",
                    found=f"{type(error).__name__}: {error}",
                    next_step="see the daemon's log for the traceback, and report it",
                )
            )

    def _fail(self, error: WeightCacheError) -> None:
        self._record.last_error = error
        self._record.progress.update("failed")
        log.error("the load failed", extra={"code": error.code, "reason": str(error)})
        self._record.machine.move(State.FAILED)

    async def _find_out(self) -> LoadRequest:
        """Which directory, which config. Reads no weight."""
        record, options = self._record, self._record.options
        record.progress.update("resolve")
        model_dir = await _resolve(options.model)
        record.model_path = str(model_dir)

        def read() -> tuple[CacheConfig, Provenance]:
            config = build_config(
                model_dir,
                layout=options.layout,
                tp_size=options.tp_size,
                tp_rank=options.tp_rank,
                dtype=options.dtype,
                quantization=options.quantization,
            )
            return config, provenance_of(model_dir)

        config, provenance = await asyncio.to_thread(read)
        record.config = config
        record.changes.announce()  # clients of another config need not wait for the load
        log.info("config", extra={"model": str(model_dir), "fingerprint": config.fingerprint})
        return LoadRequest(
            model_dir=model_dir,
            config=config,
            provenance=provenance,
            trusted_filesystems=options.trusted_filesystems,
            known_digest=lambda receipts: remembered(receipts, options.cache_dir),
        )

    async def _load(self, request: LoadRequest) -> Generation:
        """Load, again after a pause when the failure was transient. Raises the error that stands in the end."""
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                return await load(request, self._record.progress)
            except TransientFailure as failure:
                self._record.last_error = failure.cause
                if delay_s is None:
                    raise failure.cause from failure
                log.warning("loading again", extra={"after_s": delay_s, "reason": str(failure.cause)})
                self._record.progress.update(f"wait {delay_s:g} s to load again")
                await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _publish(self, model_dir: Path, generation: Generation) -> None:
        record, options = self._record, self._record.options
        digesting = Digesting(
            model_dir,
            expected=generation.receipts,
            cache_dir=options.cache_dir,
            trusted_filesystems=options.trusted_filesystems,
            on_digest=self._learn_digest,
            on_end=record.changes.announce,
        )
        record.published = Published(generation=generation, proven=ProvenReceipts(), digesting=digesting)
        record.progress.update("ready")
        log.info(
            "published",
            extra={
                "generation": generation.id,
                "version": generation.version,
                "resident_nbytes": generation.resident_nbytes,
                "bytes_read": generation.bytes_read,
                "seconds": generation.seconds,
            },
        )
        record.machine.move(State.READY)
        if generation.digest is None:
            digesting.start()

    def _learn_digest(self, digest: str) -> None:
        published = self._record.published
        if published is None:
            raise InternalError("a digest arrived before its generation was published")
        self._record.published = Published(
            generation=published.generation.with_digest(digest),
            proven=published.proven,
            digesting=published.digesting,
        )


def _signals() -> asyncio.Semaphore:
    """Released once for each SIGTERM or SIGINT."""
    arrived = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived.release)
    return arrived


async def _resolve(model: str) -> Path:
    """The checkpoint's directory. A hub id is resolved in a process of its own, so that its libraries stay out of
    here.
    """
    path = Path(model)
    if await asyncio.to_thread(path.is_dir):
        return path
    child = await Child.start("hub", HUB_MODULE, [*parent_arguments(), "--", model], answers=True)
    try:
        answer = await child.answer()
    finally:
        await child.end()
    if not isinstance(answer.get("path"), str):
        raise ContractError("the hub process answered without a path", found=sorted(answer))
    return Path(answer["path"])
