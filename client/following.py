"""Is another generation granted now than the one in use here? For an engine that asks between its steps.

Owns :class:`Follower`: it remembers what the daemon has published, and asks where it could not have heard (before it
followed, and while the lease was lost). Of a daemon that was started anew and serves other weights, with which there is
no lease, it hears what the lease finds out. It decides nothing: engines of several ranks agree on a version first
(``agreement.py``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcached.client import forks
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.messages import Event, Report

if TYPE_CHECKING:
    from weightcached.client.weights import WeightSet


@dataclass(frozen=True)
class Published:
    """What engines are granted now, and is not in use here."""

    generation: str
    version: str | None
    """None where the daemon did not say: the grant will."""
    receipts_version: str | None
    """The one that stands in until the content digest is known, which one rank's daemon may know before another's:
    ranks have the same weights where either of the two is the same."""
    drops: tuple[str, ...] = ()
    """What an engine has to drop when it switches. Empty where the daemon was asked: then everything that was computed
    from weights."""


class Follower:
    """Of one weight set. Any thread may ask."""

    def __init__(self, weights: WeightSet) -> None:
        lease = weights.lease
        if lease is None:
            raise InvalidOption("weights from disk are not followed", expected="weights of a daemon", found="disk")
        self._weights = weights
        self._lease = lease
        self._changed = threading.Condition()
        self._published: Published | None = None
        self._unheard = self._nudged = True  # something may have been published before this followed
        forks.in_child(self, Follower._begin_anew_in_child)
        lease.on_event(self._heard)
        lease.on_resumed(lambda _: self._may_have_missed())
        lease.on_served(self._found)

    def pending(self, *, timeout_s: float = 5.0) -> Published | None:
        """What to switch to, if anything. Costs nothing unless the daemon may have published unheard: then it is asked,
        and may take ``timeout_s``. Raises DaemonUnreachable and DaemonNotReady where it does not answer.
        """
        if self._unheard and self._lease.state == "connected":
            report = self._lease.status(timeout_s=timeout_s)
            with self._changed:
                if self._unheard:
                    self._published = _granted(report) or self._published
                self._unheard = False
        published = self._published
        return None if published is None or published.generation == self._weights.generation else published

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something may have been published (ask :meth:`pending`), or :meth:`nudge`; whether it was before
        the timeout.
        """
        with self._changed:
            happened = self._changed.wait_for(lambda: self._nudged, timeout_s)
            self._nudged = False
            return happened

    def nudge(self) -> None:
        """Have :meth:`wait` return."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def _begin_anew_in_child(self) -> None:
        """The thread that tells of events is the parent's, and may have had the lock at the fork."""
        self._changed = threading.Condition()

    def _heard(self, event: Event) -> None:
        if event.kind == "published" and event.generation is not None:
            with self._changed:
                self._published = Published(event.generation, event.version, event.receipts_version, event.drops)
                self._unheard = False
            self.nudge()

    def _found(self, report: Report) -> None:
        """What the place serves, to whose daemon there is no lease."""
        with self._changed:
            self._published = _granted(report) or self._published
        self.nudge()

    def _may_have_missed(self) -> None:
        with self._changed:
            self._unheard = True
        self.nudge()


def _granted(report: Report) -> Published | None:
    """What a daemon that says this grants; None where that is nothing yet."""
    current = next((one for one in report.held if one.standing == "current"), None)
    return None if current is None else Published(current.generation, current.version, current.receipts_version)
