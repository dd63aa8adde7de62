"""What is said on one connection after its grant: questions and their answers, heartbeats, events, until it ends.

Owns the questions that wait for an answer. The connection is the lease's (``lease.py``), which starts another
conversation when it has resumed: nobody who asked on one connection is answered on another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from weightcached.client.exchange import error_of, require_no_descriptors
from weightcached.client.heartbeat import Heartbeat
from weightcached.client.wake import Wake
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import ContractError, DaemonNotReady, DaemonUnreachable, ProtocolError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.messages import Event, Grant, Message, Ping, Pong, Refused, Switch

_Answer = TypeVar("_Answer", bound=Message)

# Sixteen small frames always fit into a socket's buffer, so sending never waits for a daemon that does not read.
_UNANSWERED_MAX = 16


class _Question:
    """A message to the daemon and, once it has come, the answer. Answers come in the order of the questions."""

    def __init__(self, message: Message, *answer_kinds: type[Message], wanted: bool = True) -> None:
        self.message = message
        self.answer_kinds = answer_kinds
        self.sent = False
        self.answer: Frame | None = None
        self.wanted = wanted
        """Whether anybody waits for the answer: else its descriptors are closed when it comes."""


class Conversation:
    """One thread follows it (:meth:`follow`); any thread may ask."""

    def __init__(
        self, channel: Channel, *, wake: Wake, heartbeat_s: float, on_event: Callable[[Event], object], where: str
    ) -> None:
        self._channel = channel
        self._wake = wake
        self._heartbeat = Heartbeat(heartbeat_s, now_s=time.monotonic())
        self._heartbeat_s = heartbeat_s
        self._on_event = on_event
        self._where = where
        self._changed = threading.Condition()
        self._questions: deque[_Question] = deque()
        self._tokens = 0
        self._over: str | None = None
        self._farewell = ""

    def ping(self, *, timeout_s: float) -> None:
        """Returns once the daemon has answered. Raises as :meth:`ask` does."""
        self.ask(self._new_ping(), Pong, timeout_s=timeout_s)

    def ask(self, message: Message, kind: type[_Answer], *, timeout_s: float) -> _Answer:
        """Blocks for the answer. Raises DaemonNotReady at the timeout, DaemonUnreachable when the conversation is
        over.
        """
        return cast(_Answer, self._ask(_Question(message, kind), timeout_s).message)

    def switch(self, message: Switch, *, timeout_s: float) -> tuple[Grant, OwnedFds]:
        """Blocks for the grant of another generation; the caller owns its descriptors. Raises as :meth:`ask` does, and
        what the daemon refuses with.
        """
        frame = self._ask(_Question(message, Grant, Refused), timeout_s)
        if isinstance(frame.message, Refused):
            raise error_of(frame.message, self._where)
        return cast(Grant, frame.message), frame.fds

    def switch_back(self, message: Switch) -> None:
        """Say it and wait for nothing: the generation is mapped here already. No effect on a conversation that is over,
        or with somebody who answers nothing.
        """
        with self._changed:
            if self._over is None and len(self._questions) < _UNANSWERED_MAX:
                self._questions.append(_Question(message, Grant, Refused, wanted=False))
                self._wake.nudge()

    def _ask(self, question: _Question, timeout_s: float) -> Frame:
        with self._changed:
            self._require_going_on()
            if len(self._questions) >= _UNANSWERED_MAX:
                raise self._no_answer(f"{len(self._questions)} earlier questions are not answered either")
            self._questions.append(question)
            self._wake.nudge()
            try:
                self._changed.wait_for(lambda: question.answer is not None or self._over is not None, timeout_s)
            finally:
                question.wanted = question.answer is not None
            if question.answer is None:
                self._require_going_on()
                raise self._no_answer(f"nothing within {timeout_s:g} s")
        return question.answer

    def follow(self) -> str:
        """Send what is asked, take what is answered, ask by itself when all is quiet. Blocks until the connection is
        of no more use; the reason, in words. Raises Ended. The channel is closed then.
        """
        reason = "the lease was closed here"
        try:
            while True:
                self._send_questions()
                left_s = self._heartbeat.left_s(time.monotonic())
                if self._wake.wait(left_s, on=self._channel.connection):
                    self._receive()
                elif not self._alive() and not self._wake.wait(0, on=self._channel.connection):  # a last look
                    reason = f"the daemon has not answered for {self._heartbeat_s:g} s: it is stopped, or hangs"
                    return reason
        except PeerClosed:
            reason = f"the daemon is gone{self._farewell}"
            return reason
        except (ContractError, OSError) as error:
            reason = f"the connection is of no more use: {error}"
            return reason
        finally:
            self._channel.close()
            with self._changed:
                self._over = reason
                self._changed.notify_all()

    def _alive(self) -> bool:
        """Called when there is nothing to read: whether that can still be. Has a ping sent when it is time for one."""
        now_s = time.monotonic()
        if self._heartbeat.due(now_s):
            question = _Question(self._new_ping(), Pong)
            with self._changed:
                self._questions.append(question)
        return not self._heartbeat.dead(now_s)

    def _new_ping(self) -> Ping:
        with self._changed:
            self._tokens += 1
            return Ping(token=self._tokens)

    def _send_questions(self) -> None:
        with self._changed:
            unsent = [question for question in self._questions if not question.sent]
        for question in unsent:
            self._channel.send(question.message)
            question.sent = True
            self._heartbeat.asked(time.monotonic())

    def _receive(self) -> None:
        try:
            frame = self._channel.receive(deadline=Deadline.after(0))
        except TimeoutError:
            return  # part of a frame: what is there is kept, the rest will wake us again
        if not isinstance(frame.message, Grant):
            require_no_descriptors(frame, self._where)
        self._heartbeat.heard(time.monotonic())
        if isinstance(frame.message, Event):
            if frame.message.kind != "published":
                self._farewell = f", and had said: {frame.message.kind}, {frame.message.message}"
            self._on_event(frame.message)
            return
        taken = False
        try:
            taken = self._answered(frame)
        finally:
            if not taken:
                frame.fds.close()

    def _answered(self, frame: Frame) -> bool:
        """Whether somebody has the answer now. Raises ProtocolError where it is none."""
        message = frame.message
        with self._changed:
            question = self._questions[0] if self._questions else None
            kinds = () if question is None else question.answer_kinds
            if question is None or type(message) not in kinds:
                raise ProtocolError(
                    "the daemon said something that was not asked",
                    expected=" or ".join(kind.__name__ for kind in kinds) or "nothing",
                    found=type(message).__name__,
                    where=self._where,
                )
            if isinstance(message, Pong) and isinstance(question.message, Ping):
                _require_same(question.message, message, self._where)
            self._questions.popleft()
            if question.wanted:
                question.answer = frame
                self._changed.notify_all()
            return question.wanted

    def let_go_in_child(self) -> None:
        """In a forked child, where the lock may be held by a thread that is not there: over, for whoever asks."""
        self._changed = threading.Condition()
        self._over = "this process is a forked child: its parent has the connection"

    def _require_going_on(self) -> None:
        if self._over is not None:
            raise DaemonUnreachable(
                "this lease has lost its connection to the daemon",
                expected="a connected lease",
                found=self._over,
                where=self._where,
            )

    def _no_answer(self, found: str) -> DaemonNotReady:
        return DaemonNotReady(
            "the daemon holds the connection but does not answer",
            expected="an answer",
            found=found,
            where=self._where,
            next_step="look whether the daemon is stopped or starved (`weightcached status`, `ps`)",
        )


def _require_same(ping: Ping, pong: Pong, where: str) -> None:
    if pong.token != ping.token:
        raise ProtocolError("a pong for another ping", expected=ping.token, found=pong.token, where=where)
