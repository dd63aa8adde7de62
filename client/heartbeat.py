"""When to ask a silent daemon for a sign of life, and when to give it up. Pure: it is told the time, and never waits.

The kernel tells at once when a daemon dies. It does not tell when one is stopped (SIGSTOP) or hangs: only asking does.
"""

from __future__ import annotations


class Heartbeat:
    """A connection on which nothing was heard for ``every_s`` is asked; one that does not answer for as long again is
    dead.

    So a daemon that falls silent is given up at most ``2 * every_s`` after it was last heard, and one that answers
    within ``every_s`` never is. Times are seconds on the monotonic clock.
    """

    def __init__(self, every_s: float, *, now_s: float) -> None:
        self._every_s = every_s
        self._heard_s = now_s
        self._asked_s: float | None = None

    def heard(self, now_s: float) -> None:
        """A whole frame has arrived, whatever it said."""
        self._heard_s, self._asked_s = now_s, None

    def asked(self, now_s: float) -> None:
        """A question has been sent, by whomever; the first since the last frame counts."""
        if self._asked_s is None:
            self._asked_s = now_s

    def due(self, now_s: float) -> bool:
        """Whether to ask now."""
        return self._asked_s is None and now_s >= self._at_s

    def dead(self, now_s: float) -> bool:
        """Whether to give up. Only to be believed once it was seen that nothing lies there unread."""
        return self._asked_s is not None and now_s >= self._at_s

    def left_s(self, now_s: float) -> float:
        """Seconds until either becomes true, if nothing is heard meanwhile."""
        return max(0.0, self._at_s - now_s)

    @property
    def _at_s(self) -> float:
        return (self._heard_s if self._asked_s is None else self._asked_s) + self._every_s
