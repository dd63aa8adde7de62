"""The keeper: one daemon's life from its claim on a place to the last connection, in order.

Owns the order of things, from taking over what was kept to giving up the path. What it starts it ends: worker, digest,
server, descriptors, socket file. How it comes by weights is ``acquiring.py``'s business, what is served
``publishing.py``'s, what outlives it ``custody.py``'s. It has no torch and maps no segment.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from typing import Any

from weightcached.daemon.acquiring import Acquiring
from weightcached.daemon.claim import Claim
from weightcached.daemon.control.plane import ControlPlane
from weightcached.daemon.custody import Custody
from weightcached.daemon.endpoint import Endpoint
from weightcached.daemon.generations import Generations
from weightcached.daemon.holding import Holding
from weightcached.daemon.listen_fds import HandedOver
from weightcached.daemon.notify import Notifier
from weightcached.daemon.options import ServeOptions
from weightcached.daemon.patience import in_thread
from weightcached.daemon.progress import Changes, ProgressTracker, display_for
from weightcached.daemon.proof import ProvenReceipts
from weightcached.daemon.publishing import Publishing
from weightcached.daemon.record import Limits, Record
from weightcached.daemon.refusals import unexpected
from weightcached.daemon.server import Server
from weightcached.daemon.signs import Signs
from weightcached.daemon.states import IllegalTransition, State, StateMachine
from weightcached.daemon.stopping import STOP_SIGNALS, stop_signals
from weightcached.daemon.updates import Updates
from weightcached.daemon.vault import NotifyVault, NoVault, Vault
from weightcached.protocol.errors import InternalError, WeightCacheError
from weightcached.protocol.memory.chosen import kind_on
from weightcached.protocol.messages import Event, Release, Released
from weightcached.protocol.processes import age_s

_OWN_SOCKET_MODE = stat.S_IRUSR | stat.S_IWUSR
_SHARED_SOCKET_MODE = 0o666  # whom to serve is decided by peer credentials, which no mode bits can express

log = logging.getLogger(__name__)


class Keeper:
    """Serves ``claim``'s place. :meth:`run` once; the claim is released, and the notifier closed, by whoever made them.

    ``handed`` is what the service manager handed over, which this owns from now on.
    """

    def __init__(self, options: ServeOptions, claim: Claim, handed: HandedOver, notifier: Notifier | None) -> None:
        changes = Changes()

        def changed(state: State) -> None:
            log.info("state", extra={"state": state.value})
            changes.announce()
            self._record.events.say("state")

        self._claim = claim
        self._handed = handed
        self._vault: Vault = (
            NoVault() if notifier is None else NotifyVault.from_environment(notifier, handed=handed.names)
        )
        self._record = Record(
            options=options,
            progress=ProgressTracker(display_for(options.log_format)),
            machine=StateMachine(changed),
            changes=changes,
            limits=Limits.of(options),
            generations=Generations(keep=options.keep_generations, grace_s=options.adoption_grace_s),
            release=self._release,
        )
        self._record.progress.on_update = self._record.events.progress
        self._signs = Signs(notifier, self._record)
        self._stop_asked = asyncio.Semaphore(0)
        """Released once for each SIGTERM or SIGINT, and when a client has said that the place is to be given up."""
        self._give_up = False

    async def run(self) -> None:
        """Take over what was kept, bind, adopt or load, serve until told to stop, drain. A second signal drains no
        longer.

        Raises InvalidPlace or PlaceTaken before anything is served. Any other error is a bug: what is in a vault stays
        there then, for the next keeper.
        """
        self._catch_signals()
        options = self._record.options
        self._signs.start()
        custody = self._record.custody = await Custody.open(self._vault, self._handed)
        endpoint = Endpoint(options.metrics_address, self._record)
        try:
            shared = options.allowed.uids or options.allowed.gids
            listener = await custody.listen(self._claim, mode=_SHARED_SOCKET_MODE if shared else _OWN_SOCKET_MODE)
            server = Server(listener, self._record)
            server.start()
            log.info("listening", extra={"socket": str(options.place.socket_path)})
            endpoint.start()
            await self._serve(custody, server)
        except BaseException:
            if self._vault.keeps:
                self._claim.leave()
            raise
        finally:
            stop_signals(block=True)
            await endpoint.close()
            await self._signs.close()
            self._record.progress.close()
            custody.close()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop_asked.release)
        stop_signals(block=False)

    async def _serve(self, custody: Custody, server: Server) -> None:
        holding = Holding(self._record)
        publishing = Publishing(self._record, custody, holding, server.tell)
        updates = Updates(self._record, custody, publishing, holding)
        self._record.events.describe = updates.commands.describe
        plane = ControlPlane(self._record, self._claim, updates.commands.handle)
        plane.start()
        bringing_up = asyncio.create_task(self._bring_up(custody, publishing, updates), name="bring up")
        stopping = asyncio.create_task(self._stop_asked.acquire(), name="told to stop")
        told = False
        try:
            await asyncio.wait({bringing_up, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if bringing_up.done():
                bringing_up.result()
                await self._until(stopping, holding, server)
            told = True
        finally:
            self._record.machine.move(State.DRAINING)
            await self._signs.stopping()
            bringing_up.cancel()
            await asyncio.wait({bringing_up})
            try:
                await holding.stop()
                await updates.stop()
                await self._stop(custody, server, publishing, told=told)
            finally:
                await plane.close()

    async def _until(self, stopping: asyncio.Task[bool], holding: Holding, server: Server) -> None:
        """Serve until told to stop. Raises HolderDied where what is current is a process's memory, and that ends
        before: whoever starts us again gets weights loaded anew.
        """
        ends: set[asyncio.Future[Any]] = {stopping, holding.current_lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        error = self._record.last_error = holding.current_lost.result()
        published = self._record.published
        lost = published.generation.id if published is not None else None
        server.tell(Event(kind="failed", generation=lost, message=str(error)))
        self._record.events.say("failed", str(error))
        raise error

    # Stopping

    async def _stop(self, custody: Custody, server: Server, publishing: Publishing, *, told: bool) -> None:
        record = self._record
        await publishing.stop()
        generation = record.published.generation if record.published is not None else None
        served = generation.id if generation is not None else None
        server.tell(Event(kind="draining", generation=served, message="the daemon is stopping"))
        record.events.say("draining", "the daemon is stopping")
        await self._drain(server)
        handing_on = self._vault.keeps and not told  # a bug ends us: all that is kept is the next keeper's
        if handing_on:
            self._claim.leave()
        elif custody.outlives_stop and not self._give_up:
            await custody.give_up_listener()
            self._claim.leave()  # weights are still kept: until they are served again, clients are refused
        else:
            # The weights go before the path does: an absent path says that no weights are cached here.
            await custody.empty()
            await record.generations.free()
            self._claim.unlink()
        await server.close(refuse_backlog=not handing_on)
        await record.generations.free()
        record.machine.move(State.STOPPED)

    async def _drain(self, server: Server) -> None:
        draining = asyncio.create_task(server.drain(), name="drain")
        again = asyncio.create_task(self._stop_asked.acquire(), name="told again")
        await asyncio.wait(
            {draining, again}, timeout=self._record.options.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        draining.cancel()
        again.cancel()

    async def _release(self, message: Release) -> Released:
        """What a client that may has said; the answer tells it what is given up."""
        custody = self._record.custody
        if custody is None:
            raise InternalError("a client was served before the keeper knew what it holds")
        nbytes = sum(one.nbytes for one in custody.quarantined.values())
        count = len(custody.quarantined)
        if message.quarantined_only:
            await custody.release_quarantined()
            log.info("released", extra={"quarantined": count, "nbytes": nbytes})
            return Released(generations=count, resident_nbytes=nbytes)
        log.info("told to give up the place")
        self._give_up = True
        self._stop_asked.release()
        nbytes += sum(parts.nbytes for parts in custody.candidates.values())
        count += len(custody.candidates)
        held = self._record.generations.all
        nbytes += sum(one.generation.resident_nbytes for one in held)
        count += len(held)
        return Released(generations=count, resident_nbytes=nbytes)

    # Coming up

    async def _bring_up(self, custody: Custody, publishing: Publishing, updates: Updates) -> None:
        """From what there is to ``ready``, or to ``failed`` with the reason in the record. Raises for bugs in the
        states, and for errors of ours while adopting: those are counted by whoever starts us again.
        """
        record = self._record
        await self._choose_memory()
        acquiring = Acquiring(record, custody)
        if adopted := await acquiring.adopt():
            record.adoption_seconds = age_s()
            current, *others = adopted
            for one in others:
                publishing.hold(one.generation, one.proven, one.unproven, staged=one.staged, adopted=True)
                record.generations.give_grace(one.generation.id)
            publishing.publish(current.generation, current.proven, current.unproven, adopted=True)
            await custody.retire()
        else:
            await self._load(acquiring, custody, publishing)
        if record.published is not None:
            updates.begin()
        await self._signs.settled()

    async def _choose_memory(self) -> None:
        """Whatever the driver says, or does not: what is kept is adopted, and a load says what it lacks."""
        record, options = self._record, self._record.options
        home = await in_thread(lambda: kind_on(options.device, options.memory))
        record.memory = home.memory
        log.info("memory kind", extra={"memory": home.memory, "device": home.device, "reason": home.reason})

    async def _load(self, acquiring: Acquiring, custody: Custody, publishing: Publishing) -> None:
        try:
            generation = await acquiring.load()
            self._record.progress.update("vault")
            try:
                await custody.entrust(generation)
                publishing.publish(generation, ProvenReceipts(), None)
            except BaseException:
                await generation.free()
                raise
            await custody.retire()
        except WeightCacheError as error:
            self._fail(error)
        except IllegalTransition:
            raise
        except Exception as error:
            log.exception("loading met an error of ours")
            self._fail(unexpected(error))

    def _fail(self, error: WeightCacheError) -> None:
        self._record.last_error = error
        self._record.progress.update("failed")
        log.error("the load failed", extra={"code": error.code, "reason": str(error)})
        self._record.events.say("failed", str(error))
        self._record.machine.move(State.FAILED)
