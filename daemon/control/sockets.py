"""Both sockets of the control plane and the ZeroMQ context that they live in. Imports ZeroMQ."""

from __future__ import annotations

import zmq

from weightcached.daemon.claim import Claim
from weightcached.daemon.control.command_socket import CommandSocket, Handler
from weightcached.daemon.control.event_socket import EventSocket
from weightcached.daemon.events import Events
from weightcached.protocol.control_sockets import end

ZmqError = zmq.ZMQError


class Sockets:
    """Bound, and at work until :meth:`close`. Raises what a :class:`Door` raises; nothing is left then."""

    def __init__(self, events: Events, claim: Claim, handle: Handler) -> None:
        self._events = events
        self._context = zmq.Context()
        place = claim.place
        try:
            self._listeners = EventSocket(self._context, claim=claim, path=place.events_path, snapshot=events.snapshot)
            # Last: where commands are taken, what they do can be listened to.
            self._commands = CommandSocket(self._context, claim=claim, path=place.control_path, handle=handle)
        except BaseException:
            end(self._context)
            claim.unlink_beside()
            raise
        events.sink = self._listeners.tell

    async def close(self) -> None:
        await self._commands.close()
        self._events.sink = None
        self._listeners.close()
        end(self._context)
