"""The way back to a daemon, for an engine that lost it and has the weights mapped already.

Owns one attempt: reach whoever serves the place now, with the same checks as an attach, ask for the lease of exactly
the generation and manifest that are mapped here, and judge the answer; and, where the place serves others, asking for
those as an attach does. When to try again is ``lease.py``'s.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from weightcached.client.connect import reach
from weightcached.client.counters import fallbacks
from weightcached.client.evidence import Evidence
from weightcached.client.exchange import Request, error_of, negotiate, require_no_descriptors
from weightcached.client.wake import Wake
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig, abbreviated
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    GenerationGone,
    ProtocolError,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    Grant,
    Loading,
    Message,
    Refused,
    Report,
    Resume,
    Status,
)
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """What a lease needs to be had again: where, whom to trust there, and what is mapped here."""

    place: Place
    allowed: AllowList
    generation: str
    manifest_sha256: str
    config: CacheConfig
    engine_name: str
    client_version: str

    @property
    def where(self) -> str:
        return str(self.place.socket_path)

    def attempt(self, wake: Wake, *, silence_s: float) -> tuple[Channel, Grant]:
        """One attempt: a channel that is a lease of what is mapped here, for the caller to own.

        Blocks as long as the daemon says that it is at it, and ``silence_s`` while it says nothing (a connection may
        wait in the backlog of a listener whose daemon is being restarted). Raises GenerationGone when the place has
        other weights now, which will be so for long. Everything else may be different at the next attempt:
        WeightCacheError, or OSError where this process is short of something. Raises Ended.
        """
        resume = Resume(
            client_version=self.client_version,
            name=self.engine_name,
            pid=os.getpid(),
            generation=self.generation,
            manifest_sha256=self.manifest_sha256,
            disk_fallbacks=fallbacks(),
        )
        channel = self._reach()
        try:
            answer = self._ask(channel, resume, wake, silence_s)
            if not isinstance(answer, Grant):
                raise self._unasked(answer, expected="Loading, Grant or Refused")
            self._require_same(answer)
        except BaseException:
            channel.close()
            raise
        return channel, answer

    def granted_anew(self, *, generation: str | None, version: str | None, timeout_s: float) -> tuple[Grant, OwnedFds]:
        """What the place serves now, or another ``version`` that it holds, as an attach would be granted it: the caller
        owns the descriptors. Nobody has a lease then. Blocks, in any thread.

        Raises what the daemon refuses with, GenerationGone where that is not ``generation``, DaemonAbsent,
        DaemonNotReady (it is still loading, or silent), DaemonUnreachable, OSError as :meth:`attempt`, and what else an
        attach raises.
        """
        want = version or "current"
        entries = abbreviated(self.config.entries())
        request = Request(
            self.config, entries, want, self.engine_name, os.getpid(), self.client_version, where=self.where
        )
        channel = self._reach()
        try:
            grant, fds = negotiate(
                channel,
                request,
                Evidence(),
                prove=lambda evidence: evidence,
                deadline=Deadline.after(timeout_s),
                progress=None,
            )
        finally:
            channel.close()
        if generation not in (None, grant.generation) or want not in ("current", grant.version, grant.receipts_version):
            fds.close()
            raise GenerationGone(
                "the daemon, which was started anew, grants another generation than was asked for",
                expected=generation or want,
                found=f"{grant.generation}, version {grant.version}",
                where=self.where,
                next_step="stage what it serves now, or name the version",
            )
        return grant, fds

    def report(self, wake: Wake, *, silence_s: float) -> Report | None:
        """What the place's daemon says about itself; None when it cannot be had. Raises Ended."""
        try:
            channel = self._reach()
            try:
                answer = self._ask(channel, Status(), wake, silence_s)
            finally:
                channel.close()
        except (WeightCacheError, OSError):
            return None
        return answer if isinstance(answer, Report) else None

    def _reach(self) -> Channel:
        now = Deadline.after(0)
        connection = reach(self.place, allowed=self.allowed, deadline=now, appear_by=now)
        if connection is None:
            raise DaemonAbsent("no weights are cached at this place any more", where=self.where)
        return Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)

    def _ask(self, channel: Channel, question: Message, wake: Wake, silence_s: float) -> Message:
        """The first answer that is not Loading. A refusal is raised."""
        try:
            with suppress(PeerClosed):  # it may have said why before it went
                channel.send(question, deadline=Deadline.after(silence_s))
            while True:
                frame = wake.hear(channel, timeout_s=silence_s)
                require_no_descriptors(frame, self.where)
                if isinstance(frame.message, Refused):
                    raise error_of(frame.message, self.where)
                if not isinstance(frame.message, Loading):
                    return frame.message
        except TimeoutError as error:
            raise DaemonNotReady(f"the daemon said nothing for {silence_s:g} s", where=self.where) from error
        except PeerClosed as error:
            raise DaemonUnreachable("the daemon died before it answered", where=self.where) from error

    def _require_same(self, grant: Grant) -> None:
        mapped = (self.generation, self.manifest_sha256)
        granted = (grant.generation, grant.manifest_sha256)
        if granted != mapped:
            raise GenerationGone(
                "the daemon has other weights than are mapped here",
                expected="generation {}, manifest {}".format(*mapped),
                found="generation {}, manifest {}".format(*granted),
                where=self.where,
            )

    def _unasked(self, answer: Message, *, expected: str) -> ProtocolError:
        return ProtocolError(
            "the daemon answered something that was not asked",
            expected=expected,
            found=type(answer).__name__,
            where=self.where,
        )
