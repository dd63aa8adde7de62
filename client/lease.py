"""A lease: the open connection that tells the daemon that this engine uses a generation.

Owns the connection after the grant, the thread that watches it, and whom to tell when the daemon is gone. The kernel
ends a lease when either process dies; nothing here polls. What it cannot see is a daemon that is stopped (SIGSTOP) or
hangs: :meth:`Lease.ping` asks.

Losing the daemon does not take the weights away: memory that is held by descriptors and mappings outlives it. The
engine goes on, detached: the next engine will find no daemon.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeVar, cast

from weightcached.client import forks
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import ContractError, DaemonNotReady, DaemonUnreachable, ProtocolError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import Message, Ping, Pong, Report, Status

logger = logging.getLogger("weightcached.client")

State = Literal["connected", "detached", "closed"]
OnLost = Callable[[str], None]
_Answer = TypeVar("_Answer", bound=Message)

# Sixteen small frames always fit into a socket's buffer, so sending never waits for a daemon that does not read.
_UNANSWERED_MAX = 16


class _Question:
    """A message to the daemon and, once it has come, the answer. Answers come in the order of the questions."""

    def __init__(self, message: Message, answer_kind: type[Message]) -> None:
        self.message = message
        self.answer_kind = answer_kind
        self.sent = False
        self.answer: Message | None = None


class Lease:
    """Owns ``channel``, on which a grant has just arrived. Safe to use from several threads.

    ``state`` is ``connected``; ``detached`` once the daemon is gone (or in a forked child, which never has the lease
    of its parent); ``closed`` after :meth:`close`. It lives until one of these, even if nobody refers to it any more:
    tensors may be in use that nobody can see from here.
    """

    def __init__(self, channel: Channel, *, generation: str, nonce: str, where: str) -> None:
        self.generation = generation
        self.nonce = nonce
        """Differs between two runs of a keeper."""
        self.where = where
        self._channel = channel
        self._changed = threading.Condition()
        self._state: State = "connected"
        self._closing = False
        self._reason: str | None = None
        self._callbacks: list[OnLost] = []
        self._questions: deque[_Question] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pings = 0
        self._watcher = threading.Thread(target=self._watch, name="weightcached-lease", daemon=True)
        try:
            forks.in_child(self, Lease._let_go_in_child)
            self._watcher.start()
        except BaseException:
            os.close(self._wake)
            raise

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str | None:
        """Why the lease is detached."""
        return self._reason

    def on_lost(self, callback: OnLost) -> None:
        """Have ``callback(reason)`` called, once, when the daemon is gone; at once if it is already.

        It runs in the watcher's thread and delays other callbacks while it runs. It is not called after :meth:`close`.
        """
        with self._changed:
            if self._state == "connected":
                self._callbacks.append(callback)
                return
        if self._state == "detached":
            callback(self._reason or "")

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the daemon is gone; whether it is. False at the timeout, or when the lease was closed here."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "connected", timeout_s)
            return self._state == "detached"

    def ping(self, *, timeout_s: float = 5.0) -> float:
        """Seconds that the daemon took to answer. Raises DaemonNotReady at the timeout, DaemonUnreachable when it is
        gone.
        """
        started_s = time.monotonic()
        with self._changed:
            self._pings += 1
            token = self._pings
        pong = self._ask(Ping(token=token), Pong, timeout_s)
        if pong.token != token:
            raise ProtocolError("a pong for another ping", expected=token, found=pong.token, where=self.where)
        return time.monotonic() - started_s

    def status(self, *, timeout_s: float = 5.0) -> Report:
        """What the daemon says about itself. Raises as :meth:`ping` does."""
        return self._ask(Status(), Report, timeout_s)

    def close(self) -> None:
        """Give the lease back and end the watcher. Blocks for a moment. Safe to call twice, and from a callback."""
        with self._changed:
            if self._state == "connected":
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if self._watcher is not threading.current_thread():
            self._watcher.join()
        self._state = "closed"

    def _ask(self, message: Message, kind: type[_Answer], timeout_s: float) -> _Answer:
        question = _Question(message, kind)
        with self._changed:
            self._require_connected()
            if len(self._questions) >= _UNANSWERED_MAX:
                raise self._no_answer(f"{len(self._questions)} earlier questions are not answered either")
            self._questions.append(question)
            os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: question.answer is not None or self._state != "connected", timeout_s)
            if question.answer is None:
                self._require_connected()
                raise self._no_answer(f"nothing within {timeout_s:g} s")
        return cast(_Answer, question.answer)

    def _require_connected(self) -> None:
        if self._state != "connected":
            raise DaemonUnreachable(
                "this lease has no connection to its daemon",
                expected="a connected lease",
                found=f"{self._state}{f': {self._reason}' if self._reason else ''}",
                where=self.where,
            )

    def _no_answer(self, found: str) -> DaemonNotReady:
        return DaemonNotReady(
            "the daemon holds the connection but does not answer",
            expected="an answer",
            found=found,
            where=self.where,
            next_step="look whether the daemon is stopped or starved (`weightcached status`, `ps`)",
        )

    def _watch(self) -> None:
        reason = "the watcher ended"
        try:
            poll = select.poll()
            poll.register(self._channel.connection, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            while not self._closing:
                for fd, _ in poll.poll():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                        self._send_questions()
                    else:
                        self._receive()
        except PeerClosed:
            reason = "the daemon is gone"
        except (ContractError, OSError) as error:
            reason = f"the connection is of no more use: {error}"
        finally:
            self._end(reason)

    def _send_questions(self) -> None:
        with self._changed:
            unsent = [question for question in self._questions if not question.sent]
        for question in unsent:
            self._channel.send(question.message)
            question.sent = True

    def _receive(self) -> None:
        try:
            frame = self._channel.receive(deadline=Deadline.after(0))
        except TimeoutError:
            return  # part of a frame: what is there is kept, the rest will wake us again
        frame.fds.close()
        with self._changed:
            kind = self._questions[0].answer_kind if self._questions else None
            if type(frame.message) is not kind:
                raise ProtocolError(
                    "the daemon said something that was not asked",
                    expected="nothing" if kind is None else kind.__name__,
                    found=type(frame.message).__name__,
                    where=self.where,
                )
            self._questions.popleft().answer = frame.message
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._closing:
                self._state = "closed"
            else:
                self._state, self._reason = "detached", reason
            self._channel.close()
            self._close_wake()
            callbacks = self._callbacks if self._state == "detached" else []
            self._callbacks = []
            self._changed.notify_all()
        if self._state == "detached":
            logger.warning("lost the lease at %s: %s; the weights in use stay valid", self.where, reason)
        for callback in callbacks:
            try:
                callback(reason)
            except Exception:
                logger.exception("a callback for the lost lease at %s failed", self.where)

    def _close_wake(self) -> None:
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _let_go_in_child(self) -> None:
        """In a forked child: close this copy of the connection. No thread of the parent's runs here, and no lock is
        safe.
        """
        self._changed = threading.Condition()
        self._channel.close()
        self._close_wake()
        self._questions.clear()
        self._callbacks = []
        if self._state == "connected":
            self._state, self._reason = "detached", "this process is a forked child: its parent has the lease"
