"""Room for frames that are half received or half sent: who takes too much of it is told, and no other user notices."""

from __future__ import annotations

from weightcached.daemon.record import Record
from weightcached.protocol.errors import DaemonNotReady

_SMALL_NBYTES = 4096


class InFlight:
    """Room for one connection's frames that are half through; a ``Budget`` of its channel. Small ones are not counted:
    a user who has no room left can still ask, and be told.
    """

    def __init__(self, record: Record, uid: int) -> None:
        self._quota = record.limits.in_flight
        self._uid = uid

    def take(self, nbytes: int) -> None:
        if nbytes > _SMALL_NBYTES and not self._quota.take(self._uid, nbytes):
            raise NoRoom(
                "too many frames are half received or half sent",
                expected=f"at most {self._quota.each} bytes for one user, {self._quota.in_all} for all",
                next_step="send whole frames, and read what is answered",
            )

    def give(self, nbytes: int) -> None:
        if nbytes > _SMALL_NBYTES:
            self._quota.give(self._uid, nbytes)


class NoRoom(DaemonNotReady):
    """A user has too much under way. While sending, part of a frame is out, and the stream is of no more use."""
