"""One client's connection: a task that receives requests, answers each, and ends with the connection.

Owns the connection's deadlines and what happens on every kind of failure: a broken frame, a slow or silent client, an
error of ours. Nothing here can delay another connection: it waits only for its own socket. What is answered to a
``Hello`` or a ``Resume`` is decided in ``attaching.py``; after a grant the connection is the lease, on which events are
said unasked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

from weightcached.daemon.attaching import attend, attend_resume, switch_now
from weightcached.daemon.generation import Generation
from weightcached.daemon.in_flight import InFlight, NoRoom
from weightcached.daemon.leases import Lease
from weightcached.daemon.record import Record
from weightcached.daemon.refusals import refusal, unexpected
from weightcached.daemon.snapshot import report
from weightcached.daemon.states import State
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.errors import (
    ContractError,
    DaemonNotReady,
    ProtocolError,
    UntrustedClient,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import FrameSender, PeerClosed, encode_frame
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    Event,
    GiveUp,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Resume,
    Stage,
    Status,
    Switch,
    Unproven,
)
from weightcached.protocol.peers import peer_of

IDLE_TIMEOUT_S = 60.0
"""How long a connection without a lease may stay silent between two requests."""

log = logging.getLogger(__name__)


class _TooSlow(Exception):
    """The client did not take a reply in time: part of a frame may be out, so nothing more can be said."""


class _Over(Exception):
    """The conversation has ended as it should: nothing is left to say."""


class Connection:
    """Owns the accepted socket. Run :meth:`serve` as a task; cancelling it drops the client."""

    def __init__(self, accepted: socket.socket, record: Record) -> None:
        self._record = record
        self._timeout_s = record.options.exchange_timeout_s
        self.peer = peer_of(accepted)
        self._channel = AsyncChannel(
            accepted, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON, budget=InFlight(record, self.peer.uid)
        )
        self._held = ExitStack()
        self._lease: Lease | None = None
        self._unsaid: list[Event] = []
        self._sending = False
        self.busy = False
        """Whether a request has begun and its answer is not out: a stopping daemon waits for these."""

    async def serve(self) -> None:
        """Converse until either side ends it. Raises nothing but CancelledError."""
        with self._held:
            try:
                await self._converse()
            except _Over:
                pass
            except (PeerClosed, ConnectionError) as error:
                log.debug("connection ended", extra={"peer": str(self.peer), "reason": str(error)})
            except _TooSlow:
                self._record.protocol_errors["slow_reader"] += 1
                log.warning("dropped a client that did not read its answer", extra={"peer": str(self.peer)})
            except NoRoom as error:
                self._record.protocol_errors["too_much_in_flight"] += 1
                log.warning("dropped", extra={"peer": str(self.peer), "reason": str(error)})
                if not self._sending:
                    await self._last_word(error)
            except WeightCacheError as error:
                log.warning("refused", extra={"peer": str(self.peer), "code": error.code, "reason": str(error)})
                await self._last_word(error)
            except Exception as error:
                log.exception("a request met an error of ours", extra={"peer": str(self.peer)})
                await self._last_word(unexpected(error))
            finally:
                self.busy = False
                self._channel.close()

    async def _converse(self) -> None:
        if not self._record.options.allowed.admits(self.peer):
            raise UntrustedClient(
                "this daemon does not serve that user",
                expected="root, the daemon's user, or one on its allow-list",
                found=str(self.peer),
                next_step="start the daemon with --allow-uid or --allow-gid",
            )
        message = await self._receive_first()
        while True:
            idle_s = await self._answer(message)
            while self._unsaid:
                await self._send(self._unsaid.pop(0))
            self.busy = False
            if self._record.state is State.DRAINING:
                raise _Over
            message = await self._receive_next(idle_s)

    async def _receive_first(self) -> Message:
        """The first request has one deadline from the connection's beginning, silence included."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._channel.readable()
                self.busy = True
                return await self._receive()
        except TimeoutError as error:
            raise self._late() from error

    async def _receive_next(self, idle_s: float | None) -> Message:
        """Another request may begin within ``idle_s`` (``None``: whenever it likes), and then has one deadline."""
        try:
            async with asyncio.timeout(idle_s):
                await self._channel.readable()
            self.busy = True
            async with asyncio.timeout(self._timeout_s):
                return await self._receive()
        except TimeoutError as error:
            raise self._late() from error

    async def _receive(self) -> Message:
        frame = await self._channel.receive()
        frame.fds.close()
        return frame.message

    def _late(self) -> ProtocolError:
        return ProtocolError("no complete request arrived in time", expected=f"one within {self._timeout_s:g} s")

    async def _answer(self, message: Message) -> float | None:
        """Answer one request; how long the connection may then be idle (``None``: for ever)."""
        if self._lease is not None:
            self._lease.heard()
        if isinstance(message, Status):
            await self._send(report(self._record))
        elif isinstance(message, Ping):
            await self._send(Pong(token=message.token))
        elif isinstance(message, Release):
            await self._release(message)
        elif isinstance(message, Switch):
            await self._switch(message)
        elif isinstance(message, Stage):
            await self._stage(message)
        elif isinstance(message, GiveUp):
            raise ProtocolError("nothing is pushed on this connection", expected="Stage, before GiveUp", found="GiveUp")
        elif isinstance(message, Hello | Resume):
            if self._lease is not None:
                found = type(message).__name__
                raise ProtocolError(
                    "this connection is a lease already", expected="Status, Ping or Switch", found=found
                )
            self._record.fallbacks.hear(self.peer, message.name, message.disk_fallbacks)
            return await (self._hello(message) if isinstance(message, Hello) else self._resume(message))
        return None if self._lease is not None else IDLE_TIMEOUT_S

    async def _release(self, message: Release) -> None:
        self._require_owner("give up the daemon's weights")
        await self._send(await self._record.release(message))

    def _require_owner(self, what: str) -> None:
        if self.peer.uid not in (0, os.geteuid()):
            raise UntrustedClient(
                f"this user may not {what}", expected="root, or the daemon's own user", found=str(self.peer)
            )

    async def _stage(self, stage: Stage) -> None:
        """A trainer pushes, for as long as it takes: a daemon that stops does not wait for it."""
        self._require_owner("push weights")
        if self._lease is not None:
            raise ProtocolError("this connection is a lease already", expected="one of its own", found="Stage")
        staging = self._record.staging
        if staging is None:
            raise DaemonNotReady("the daemon has not published its weights yet", found=f"state {self._record.state}")
        self.busy = False
        await staging.attend(stage, self._channel, self._send)
        raise _Over

    async def _resume(self, resume: Resume) -> None:
        answer = await attend_resume(resume, self._record, self._send)
        if isinstance(answer, Generation):
            await self._grant(resume, answer, outcome="resumed")
            return
        self._record.attaches[answer.code] += 1
        log.info("not resumed", extra=_fields(self, resume) | _outcome(answer))
        await self._send(answer)
        raise _Over

    async def _switch(self, switch: Switch) -> None:
        """Grant another generation on this lease, which is of that one from then on."""
        if self._lease is None:
            raise ProtocolError("this connection is no lease", expected="Hello or Resume first", found="Switch")
        answer = switch_now(switch, self._record)
        fields = {"peer": str(self.peer), "client": self._lease.name, "generation": self._lease.generation}
        if isinstance(answer, Refused):
            self._record.attaches[answer.code] += 1
            log.info("not switched", extra=fields | _outcome(answer))
            await self._send(answer)
            return
        # The one it had stays leased until the new one is out: what is half sent must not cost the engine both.
        with self._record.leases.held(
            peer=self.peer, claimed_pid=self._lease.claimed_pid, name=self._lease.name, generation=answer.id
        ) as moved:
            with answer.export() as fds:
                await self._send(answer.grant(nonce=self._record.nonce), [fds[n] for n in range(len(fds))])
            if moved.generation != self._lease.generation:
                self._record.events.lease("lease_opened", moved)
                self._record.events.lease("lease_closed", self._lease)
            self._record.leases.move(self._lease, answer.id)
        self._record.attaches["switched"] += 1
        log.info("switched", extra=fields | {"to": answer.id, "version": answer.version})

    async def _hello(self, hello: Hello) -> float | None:
        asked_s = time.monotonic()
        answer = await attend(hello, self._record, self._send, uid=self.peer.uid)
        if isinstance(answer, Generation):
            await self._grant(hello, answer)
            self._record.attach_durations.add(time.monotonic() - asked_s)
            return None
        self._record.attaches[answer.code if isinstance(answer, Refused) else "unproven"] += 1
        log.info("not granted", extra=_fields(self, hello) | _outcome(answer))
        await self._send(answer)
        if isinstance(answer, Refused):
            raise _Over
        return max(hello.wait_s, self._timeout_s)  # to compute a digest in

    async def _grant(self, asked: Hello | Resume, generation: Generation, *, outcome: str = "granted") -> None:
        """Make this connection a lease. Who resumes has the descriptors already."""
        if not self._record.limits.leases.take(self.peer.uid):
            raise DaemonNotReady(
                "this user has as many leases as one may have",
                expected=f"fewer than {self._record.limits.leases.each}",
                next_step="try again when engines have left, or raise the daemon's --leases-per-uid-max",
            )
        self._held.callback(self._record.limits.leases.give, self.peer.uid)
        # In the book before the client can know: whoever has a grant has a lease that status shows.
        lease = self._held.enter_context(
            self._record.leases.held(peer=self.peer, claimed_pid=asked.pid, name=asked.name, generation=generation.id)
        )
        self._lease = lease  # from here on events are not missed
        self._record.events.lease("lease_opened", lease)
        self._held.callback(self._record.events.lease, "lease_closed", lease)
        grant = generation.grant(nonce=self._record.nonce)
        with generation.export() if isinstance(asked, Hello) else OwnedFds() as fds:
            await self._send(grant, [fds[position] for position in range(len(fds))])
        self._record.attaches[outcome] += 1
        log.info(outcome, extra=_fields(self, asked) | {"generation": generation.id, "version": generation.version})
        self._held.callback(log.info, "lease ended", extra=_fields(self, asked))

    def tell(self, event: Event) -> None:
        """Say ``event`` to an engine: at once, or after the answer that is under way. Whoever does not read enough to
        take it at once is dropped. Nothing is said on a connection that is not a lease.
        """
        if self._lease is None:
            return
        if self.busy:
            self._unsaid.append(event)
        elif not say_at_once(self._channel.connection, event):
            log.warning("dropped an engine that does not read", extra={"peer": str(self.peer)})
            self._channel.close()

    async def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        self._sending = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._channel.send(message, fds)
        except TimeoutError as error:
            raise _TooSlow from error
        self._sending = False

    async def _last_word(self, error: WeightCacheError) -> None:
        counts = self._record.protocol_errors if isinstance(error, ContractError) else self._record.attaches
        counts[error.code] += 1
        try:
            await self._send(refusal(error))
        except (ConnectionError, _TooSlow) as problem:
            log.debug("a refusal did not arrive", extra={"peer": str(self.peer), "reason": repr(problem)})

    def dismiss(self, refused: Refused) -> None:
        """Tell a client that was never answered why, if its socket takes it at once. The caller then cancels the
        task.
        """
        if not self.busy and self._lease is None:
            say_at_once(self._channel.connection, refused)


def say_at_once(connection: socket.socket, message: Refused | Event) -> bool:
    """One attempt to send, without waiting; whether all of it is out. If not, nothing more can be said."""
    try:
        return FrameSender(encode_frame(DAEMON_TO_CLIENT, message)).step(connection)
    except OSError as error:
        log.debug("something said at once did not arrive", extra={"reason": repr(error)})
        return False


def _fields(connection: Connection, asked: Hello | Resume) -> dict[str, object]:
    wanted = asked.want if isinstance(asked, Hello) else asked.generation
    return {"peer": str(connection.peer), "client": asked.name, "want": wanted}


def _outcome(answer: Refused | Unproven) -> dict[str, object]:
    if isinstance(answer, Refused):
        return {"code": answer.code, "reason": answer.message, "found": answer.found}
    return {"code": "unproven", "reason": answer.reason, "rule": answer.rule}
