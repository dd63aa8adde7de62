"""A lease: the open connection that tells the daemon that this engine uses a generation.

Owns the connection after the grant, the thread that watches it, the way back to the daemon when it is lost, and whom to
tell. The kernel ends a lease when either process dies, and tells both at once; a daemon that is stopped or hangs is
noticed by heartbeat. What is said on the connection is ``conversation.py``'s, one attempt to resume ``rejoin.py``'s.

Losing the daemon does not take the weights away: memory that is held by descriptors and mappings outlives it. The
engine goes on, ``detached``, until a daemon serves the very same generation again (one that adopted it), or another
one: then it is ``stale``, and goes on too, unless it chose otherwise. What is served then can still be staged, by a
fresh connection; once it is in use, the lease is of that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NoReturn, TypeVar

from weightcached.client import forks
from weightcached.client.backoff import Backoff
from weightcached.client.conversation import Conversation
from weightcached.client.rejoin import Rejoin
from weightcached.client.stale import OnStale, StaleCallback, exit_process
from weightcached.client.wake import Ended, Wake
from weightcached.protocol.channel import Channel
from weightcached.protocol.errors import (
    RESTARTING,
    DaemonUnreachable,
    GenerationGone,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import Event, Grant, Report, Status, Switch

logger = logging.getLogger("weightcached.client")

State = Literal["connected", "detached", "stale", "closed"]
_Callback = TypeVar("_Callback", bound=Callable[..., object])


class Lease:
    """Owns ``channel``, on which a grant has just arrived. Safe to use from several threads.

    ``connected`` ⇄ ``detached`` (the daemon is gone, hangs, or broke the contract: it is looked for again and again),
    and from there ``stale`` (the place serves another generation) until one comes into use here that the place serves:
    then it is ``connected`` again. ``closed`` after :meth:`close`. In a forked child it is ``detached`` for good: the
    lease is its parent's. It lives until it is closed, even if nobody refers to it any more: tensors may be in use that
    nobody can see from here.

    A daemon that dies is noticed at once, one that hangs within ``2 * heartbeat_s``. Callbacks run in the watcher's
    thread, which does nothing else meanwhile: one that blocks delays all that comes after it. They are not called
    after :meth:`close`.
    """

    def __init__(
        self, channel: Channel, rejoin: Rejoin, *, nonce: str, heartbeat_s: float, on_stale: OnStale = "keep"
    ) -> None:
        self.generation = rejoin.generation
        self.where = rejoin.where
        self.nonce = nonce
        """Differs between two runs of a keeper."""
        self.losses = 0
        """How often the daemon was lost."""
        self.resumes = 0
        """How often a daemon was found again that serves the generation in use."""
        self._rejoin = rejoin
        self._losses_before_switch = 0
        self._heartbeat_s = heartbeat_s
        self._policy = on_stale
        self._changed = threading.Condition()
        self._state: State = "connected"
        self._reason: str | None = None
        self._obstacle: WeightCacheError | OSError | None = None
        self._report: Report | None = None
        self._on_lost: list[Callable[[str], object]] = []
        self._on_resumed: list[Callable[[float], object]] = []
        self._on_stale: list[StaleCallback] = [] if isinstance(on_stale, str) else [on_stale]
        self._on_event: list[Callable[[Event], object]] = []
        self._on_served: list[Callable[[Report], object]] = []
        self._wake = Wake()
        self._channel = channel
        self._conversation = self._new_conversation()
        self._watcher = threading.Thread(target=self._watch, name="weightcached-lease", daemon=True)
        try:
            forks.in_child(self, Lease._let_go_in_child)
            self._watcher.start()
        except BaseException:
            self._wake.end()  # whether or not there is a thread by now
            raise

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str | None:
        """Why the lease is detached or stale; None while it is connected."""
        return self._reason

    @property
    def obstacle(self) -> str | None:
        """What the latest attempt to resume met; None before the first, and while nothing is attempted: the lease is
        connected, or stale.
        """
        return None if self._obstacle is None else str(self._obstacle)

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Have ``callback(reason)`` called whenever the daemon is lost; here and now if it is lost already."""
        with self._changed:
            self._on_lost.append(callback)
            reason = self._reason if self._state in ("detached", "stale") else None
        if reason is not None:
            callback(reason)

    def on_resumed(self, callback: Callable[[float], object]) -> None:
        """Have ``callback(detached_s)`` called whenever the lease is connected again, with the seconds without it."""
        with self._changed:
            self._on_resumed.append(callback)

    def on_stale(self, callback: StaleCallback) -> None:
        """Have ``callback(reason, report)`` called, once each time, when the place serves another generation; here and
        now if it does already. ``report`` is what the daemon says about itself then, None when it does not. Under
        policy ``exit`` the process ends as soon as it returns.
        """
        with self._changed:
            self._on_stale.append(callback)
            if self._state != "stale":
                return
        callback(self._reason or "", self._report)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have ``callback(event)`` called with everything that the daemon says unasked."""
        with self._changed:
            self._on_event.append(callback)

    def on_served(self, callback: Callable[[Report], object]) -> None:
        """Have ``callback(report)`` called, while the lease is stale, with what the place's daemon says about itself:
        each time that it serves another generation than before; here and now if it is known. It is asked every two
        seconds then, by connections of their own, because no events come.
        """
        with self._changed:
            self._on_served.append(callback)
            report = self._report if self._state == "stale" else None
        if report is not None:
            callback(report)

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the daemon is lost, or no time if it is; whether that is so. False at the timeout, or when the
        lease is closed here. True also when it was lost meanwhile, and found again.
        """
        with self._changed:
            before = self.losses
            self._changed.wait_for(lambda: self._state != "connected" or self.losses > before, timeout_s)
            return self._state in ("detached", "stale") or self.losses > before

    def wait_for(self, *states: State, timeout_s: float | None = None) -> bool:
        """Block until the lease is in one of ``states``; whether it is. One that lasts a moment only may be missed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state in states, timeout_s)

    def ping(self, *, timeout_s: float = 5.0) -> float:
        """Seconds that the daemon took to answer. Raises DaemonNotReady at the timeout, DaemonUnreachable when it is
        lost.
        """
        started_s = time.monotonic()
        self._connected().ping(timeout_s=timeout_s)
        return time.monotonic() - started_s

    def status(self, *, timeout_s: float = 5.0) -> Report:
        """What the daemon says about itself. Raises as :meth:`ping` does."""
        return self._connected().ask(Status(), Report, timeout_s=timeout_s)

    def switch(
        self, *, generation: str | None = None, version: str | None = None, timeout_s: float = 60.0
    ) -> tuple[Grant, OwnedFds]:
        """Ask for another generation, by id or version, or the one that is granted now. The caller owns the descriptors
        and says then what became of it: :meth:`using` or :meth:`keep_using`. A lease that is stale asks by a connection
        of its own, whose lease ends with the answer: the descriptors hold the memory.

        Raises as :meth:`ping` does, and what the daemon refuses with (GenerationGone).
        """
        self._losses_before_switch = self.losses
        if self._state == "stale":
            timeout_s = min(timeout_s, 2 * self._heartbeat_s)  # nothing tells a daemon that hangs from one that loads
            return self._rejoin.granted_anew(generation=generation, version=version, timeout_s=timeout_s)
        conversation = self._connected()
        try:
            return conversation.switch(Switch(generation=generation, version=version), timeout_s=timeout_s)
        except BaseException as error:
            if not isinstance(error, GenerationGone):  # it may still be granted, to nobody
                self.keep_using()
            raise

    def using(self, grant: Grant) -> None:
        """From now on the generation of ``grant``, which the last :meth:`switch` gave, is in use here: it is what the
        lease is of, and resumed for.
        """
        with self._changed:
            self.generation = grant.generation
            self._rejoin = replace(self._rejoin, generation=grant.generation, manifest_sha256=grant.manifest_sha256)
            told = self.losses == self._losses_before_switch
        if not told:  # the lease that was asked on is gone, and another was had for the generation before
            self.keep_using()
        self._wake.nudge()  # a lease that is stale may be had for this one

    def keep_using(self) -> None:
        """Have the daemon know which generation is in use here, whatever was asked for by :meth:`switch`. Waits for
        nothing; a lease that is resumed later says it by itself.
        """
        self._conversation.switch_back(Switch(generation=self.generation))

    def close(self) -> None:
        """Give the lease back and end the watcher, also in the middle of an attempt to resume. Blocks for a moment, or
        until a callback that is running returns. Safe to call twice, and from a callback.
        """
        self._wake.end()
        if self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._changed:
            self._state, self._reason = "closed", None
            self._changed.notify_all()

    def _connected(self) -> Conversation:
        with self._changed:
            if self._state == "connected":
                return self._conversation
            found = f"{self._state}{f': {self._reason}' if self._reason else ''}"
        raise DaemonUnreachable(
            "this lease has no connection to its daemon", expected="a connected lease", found=found, where=self.where
        )

    def _new_conversation(self) -> Conversation:
        return Conversation(
            self._channel,
            wake=self._wake,
            heartbeat_s=self._heartbeat_s,
            on_event=lambda event: self._tell(tuple(self._on_event), event),
            where=self.where,
        )

    def _watch(self) -> None:
        """The watcher's life."""
        try:
            self._hold()
        except Ended:
            pass
        except Exception:
            logger.exception("the watcher of the lease at %s failed: please report it", self.where)
            self._lose("the lease's watcher failed; the log has the reason")
        finally:
            self._channel.close()
            self._wake.close()

    def _hold(self) -> NoReturn:
        """Have the lease, lose it, have it again. Raises Ended."""
        while True:
            reason = self._conversation.follow()
            lost_s = time.monotonic()
            self._lose(reason)
            self._resume(self._come_back(), lost_s)

    def _lose(self, reason: str) -> None:
        told = self._move("detached", reason, self._on_lost)
        if told is not None:
            logger.warning("lost the lease at %s: %s; going on with the weights at hand", self.where, reason)
            self._tell(told, reason)

    def _come_back(self) -> Grant:
        """Try until the lease is had again; the channel then is the new one. Where the place serves another generation
        that is when one has come into use that it serves. Raises Ended.
        """
        backoff = Backoff()
        while True:
            self._wake.wait(backoff.next_s())
            rejoin = self._rejoin
            try:
                self._channel, grant = rejoin.attempt(self._wake, silence_s=2 * self._heartbeat_s)
                return grant
            except GenerationGone as gone:
                if rejoin is self._rejoin:  # else another one came into use meanwhile: that may be served
                    self._be_stale(gone, rejoin)
                backoff = Backoff()
            except (WeightCacheError, OSError) as error:
                if type(error) is not type(self._obstacle):
                    level = logging.INFO if isinstance(error, RESTARTING) else logging.WARNING
                    logger.log(level, "cannot resume the lease at %s yet: %s", self.where, error)
                self._obstacle = error

    def _resume(self, grant: Grant, lost_s: float) -> None:
        detached_s = time.monotonic() - lost_s
        self.nonce = grant.nonce
        self._obstacle = None
        self._conversation = self._new_conversation()
        if grant.generation != self.generation:  # it came into use while this was being resumed
            self.keep_using()
        told = self._move("connected", None, self._on_resumed)
        if told is not None:
            logger.info("resumed the lease at %s after %.3f s", self.where, detached_s)
            self._tell(told, detached_s)

    def _be_stale(self, gone: GenerationGone, rejoin: Rejoin) -> None:
        """Blocks until another generation is in use than ``rejoin`` is for, and says meanwhile what the place serves,
        if anybody wants to know; or until that is the one in use here again. Raises Ended.
        """
        silence_s = 2 * self._heartbeat_s
        report = rejoin.report(self._wake, silence_s=silence_s)
        self._go_stale(gone, report)
        served: str | None = None
        backoff = Backoff()
        while self._rejoin is rejoin:
            if report is not None and report.generation not in (None, served):
                self._report, served = report, report.generation
                self._tell(tuple(self._on_served), report)
            self._wake.wait(backoff.next_s())
            if self._on_served:
                report = rejoin.report(self._wake, silence_s=silence_s)
            if report is not None and served is not None and report.generation == rejoin.generation != served:
                return

    def _go_stale(self, gone: GenerationGone, report: Report | None) -> None:
        reason = str(gone)
        self._report, self._obstacle = report, None
        told = self._move("stale", reason, self._on_stale)
        if told is not None:
            logger.warning("no lease any more at %s: %s; the weights in use stay what they are", self.where, reason)
            self._tell(told, reason, report)
            if self._policy == "exit":
                exit_process(self.where, reason)

    def _move(self, state: State, reason: str | None, callbacks: list[_Callback]) -> tuple[_Callback, ...] | None:
        """Whom to tell: those of ``callbacks`` that could not see the new state when they were added. None after
        :meth:`close`, when nothing moves any more.
        """
        with self._changed:
            if self._wake.ended:
                return None
            self._state, self._reason = state, reason
            self.losses += state == "detached"
            self.resumes += state == "connected"
            self._changed.notify_all()
            return tuple(callbacks)

    def _tell(self, callbacks: Iterable[Callable[..., object]], *words: object) -> None:
        for callback in callbacks:
            if self._wake.ended:
                return
            try:
                callback(*words)
            except Exception:
                logger.exception("a callback of the lease at %s failed", self.where)

    def _let_go_in_child(self) -> None:
        """In a forked child: close this copy of the connection. No thread of the parent's runs here, and no lock is
        safe.
        """
        self._changed = threading.Condition()
        self._channel.close()
        self._wake.let_go_in_child()
        self._conversation.let_go_in_child()
        for callbacks in (self._on_lost, self._on_resumed, self._on_stale, self._on_event, self._on_served):
            callbacks.clear()
        if self._state != "closed":
            self._state, self._reason = "detached", "this process is a forked child: its parent has the lease"
