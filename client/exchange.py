"""The conversation of one attach: Hello, waiting, proving content, and the answer. One overall deadline.

Owns which answers are possible and which error each becomes. Does not connect (``connect.py``) and does not look at
descriptors (``transfer.py``). Called by ``attach.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightcached.client.counters import fallbacks
from weightcached.client.evidence import Evidence
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig, explain_differences
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    ERRORS_BY_CODE,
    CacheConfigMismatch,
    CheckpointUnproven,
    DaemonNotReady,
    DaemonUnreachable,
    ProtocolError,
    TransferError,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import Frame, PeerClosed
from weightcached.protocol.messages import WAIT_MAX_S, Grant, Hello, Loading, Refused, Unproven
from weightcached.protocol.text import one_line

logger = logging.getLogger("weightcached.client")

Progress = Callable[[Loading], None]
"""Called in the attaching thread with every report on a load, a daemon's or our own."""

_LOG_EVERY_S = 10.0


class ConnectionLost(DaemonUnreachable):
    """The daemon ended the connection in the middle of an exchange. ``answered``: it had answered before."""

    def __init__(self, message: str, *, answered: bool, where: str, found: str = "the end of the connection") -> None:
        super().__init__(
            message,
            expected="an answer",
            found=found,
            where=where,
            next_step="look into the daemon's log for why it ended, and start it again",
        )
        self.answered = answered

    def at_last(self, times: int) -> ConnectionLost:
        """The same, for an attach that went on asking until its deadline and was left ``times`` times."""
        found = f"the end of the connection ({times} times), and nobody else who answered before the deadline"
        return ConnectionLost(self.message, answered=self.answered, where=str(self.where), found=found)


class NeverAnswered(DaemonNotReady):
    """Not a word came before the deadline, although the connection held."""


@dataclass(frozen=True)
class Request:
    """What an attach asks for, apart from the evidence of content. ``where`` names the daemon's socket in errors."""

    config: CacheConfig
    entries: Mapping[str, Any]
    """The config's entries, abbreviated: made before connecting, because a connection should not wait for it."""
    want: str
    engine_name: str
    pid: int
    client_version: str
    where: str

    def hello(self, evidence: Evidence, deadline: Deadline) -> Hello:
        return Hello(
            client_version=self.client_version,
            name=self.engine_name,
            pid=self.pid,
            config=dict(self.entries),
            fingerprint=self.config.fingerprint,
            receipts=evidence.receipts,
            receipts_trusted=evidence.receipts_trusted,
            digest=evidence.digest,
            want=self.want,
            wait_s=min(deadline.remaining_s(), WAIT_MAX_S),
            disk_fallbacks=fallbacks(),
        )


def negotiate(
    channel: Channel,
    request: Request,
    evidence: Evidence,
    *,
    prove: Callable[[Evidence], Evidence],
    deadline: Deadline,
    progress: Progress | None,
) -> tuple[Grant, OwnedFds]:
    """Ask for the weights and wait for them. The caller owns the descriptors that came with the grant.

    ``prove`` is asked for a digest when the daemon finds receipts not enough. Raises what the daemon refuses with,
    DaemonNotReady at the deadline, ConnectionLost, ProtocolError, TransferError; the channel is then of no more use.
    """
    waiting = _Waiting(request.where, progress)
    try:
        _say(channel, request.hello(evidence, deadline), deadline)
        while True:
            frame = channel.receive(deadline=deadline)
            message = frame.message
            if isinstance(message, Grant):
                return message, frame.fds
            require_no_descriptors(frame, request.where)
            if isinstance(message, Loading):
                waiting.report(message)
            elif isinstance(message, Unproven):
                evidence = _proven(message, evidence, prove, request.where)
                _say(channel, request.hello(evidence, deadline), deadline)
            elif isinstance(message, Refused):
                raise refusal(message, request.config, request.where)
            else:
                raise ProtocolError(
                    "the daemon answered something that was not asked",
                    expected="Loading, Grant, Unproven or Refused",
                    found=type(message).__name__,
                    where=request.where,
                )
    except TimeoutError as error:
        raise waiting.not_ready() from error
    except PeerClosed as error:
        raise _ended(error, waiting, request.where) from error


def _say(channel: Channel, hello: Hello, deadline: Deadline) -> None:
    """Send. A daemon that has gone may have said why before: receiving finds its last words, or that there are none."""
    try:
        channel.send(hello, deadline=deadline)
    except PeerClosed:
        return


class _Waiting:
    """What has been heard while waiting: shown, logged at each new stage and every ten seconds, told when it was too
    long.
    """

    def __init__(self, where: str, progress: Progress | None) -> None:
        self._where = where
        self._progress = progress
        self._logged_s = 0.0
        self.last: Loading | None = None

    def report(self, loading: Loading) -> None:
        now_s = time.monotonic()
        if self.last is None or self.last.stage != loading.stage or now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            logger.info("waiting for the daemon at %s: %s", self._where, _words(loading))
        self.last = loading
        if self._progress is not None:
            self._progress(loading)

    def not_ready(self) -> DaemonNotReady:
        kind = NeverAnswered if self.last is None else DaemonNotReady
        return kind(
            "the daemon was not ready before the deadline",
            expected="weights",
            found="no answer at all" if self.last is None else f"still at {_words(self.last)}",
            where=self._where,
            next_step="allow more time (timeout_s), or see `weightcached status` for what the daemon does",
        )


def _words(loading: Loading) -> str:
    stage = one_line(loading.stage)
    if not loading.bytes_total:
        return stage
    done, total, rate = loading.bytes_done / 1e9, loading.bytes_total / 1e9, loading.bytes_per_s / 1e9
    return f"{stage}, {done:.2f} of {total:.2f} GB at {rate:.2f} GB/s"


def require_no_descriptors(frame: Frame, where: str) -> None:
    """Every answer but the first Grant comes without descriptors. TransferError; they are closed then."""
    with frame.fds:
        if len(frame.fds):
            raise TransferError(
                "descriptors came with an answer that has none",
                expected=0,
                found=f"{len(frame.fds)} with a {type(frame.message).__name__}",
                where=where,
            )


def _proven(message: Unproven, evidence: Evidence, prove: Callable[[Evidence], Evidence], where: str) -> Evidence:
    if evidence.digest is not None or evidence.receipts is None:
        raise CheckpointUnproven(
            "the daemon cannot prove that its weights are the checkpoint that was asked for",
            expected="content proven by receipts or by a digest",
            found=f"{message.reason} (rule: {message.rule})",
            where=where,
            next_step="wait until the daemon knows its digest (`weightcached status`), then start the engine again",
        )
    why = one_line(f"{message.reason}; rule: {message.rule}")
    logger.info("receipts prove nothing (%s): computing the checkpoint's digest", why)
    return prove(evidence)


def _ended(error: PeerClosed, waiting: _Waiting, where: str) -> WeightCacheError:
    """A daemon sends each frame whole, so a frame cut off is a broken peer; between frames, a daemon that ended."""
    if error.mid_frame:
        return ProtocolError(
            "the daemon's answer was cut off", expected="a whole frame", found="the end of the connection", where=where
        )
    if waiting.last is None:
        return ConnectionLost("the daemon died during the exchange, without an answer", answered=False, where=where)
    message = f"the daemon died during the exchange, at {_words(waiting.last)}"
    return ConnectionLost(message, answered=True, where=where)


def refusal(message: Refused, config: CacheConfig, where: str) -> WeightCacheError:
    """The error that a refusal of a Hello stands for. Config differences are spelled out to their leaves."""
    if message.code == CacheConfigMismatch.code:
        return _mismatch(message, config, where)
    return error_of(message, where)


def error_of(message: Refused, where: str) -> WeightCacheError:
    """The error that a refusal stands for, with the daemon's words."""
    kind = ERRORS_BY_CODE.get(message.code)
    if kind is None:
        return ProtocolError(
            "the daemon refused with a code that this release does not know",
            expected="a code of the error tree",
            found=f"{message.code}: {message.message}",
            where=where,
            next_step="install the same weightcached release on both sides",
        )
    if kind is CacheConfigMismatch:
        return ProtocolError("the daemon compared a config that it was not told", found=message.message, where=where)
    return kind(
        message.message,
        expected=message.expected,
        found=message.found,
        where=message.where or where,
        next_step=message.next_step,
    )


def _mismatch(message: Refused, config: CacheConfig, where: str) -> WeightCacheError:
    ours = config.entries()
    names = [field.name for field in message.fields]
    try:
        fields = explain_differences(
            {field.name: field.value for field in message.fields if field.present},
            {name: ours[name] for name in names if name in ours},
        )
    except RecursionError as error:
        raise ProtocolError("the daemon's config is nested too deeply to compare", where=where) from error
    return CacheConfigMismatch(message.message, fields=fields, where=message.where or where)
