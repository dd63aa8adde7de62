"""A lying daemon and a lying client that follow a script, for fault tests of whoever speaks this protocol.

They talk over real Unix sockets with real descriptors; no test framework is needed. A script is a list of steps::

    import tempfile

    from weightcached.protocol.framing import PeerClosed
    from weightcached.protocol.messages import Ping, Pong
    from weightcached.protocol.testing import LyingClient, LyingDaemon, Receive, Send, SendRaw, frame

    honest = [Receive(), Send(lambda ping: Pong(token=ping.token))]
    cut_short = [Receive(), SendRaw(frame(Pong(token=7))[:-1])]

    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/lying.sock"
        with LyingDaemon(path, honest, cut_short):  # the first connection is told the truth, all others half of it
            with LyingClient(path) as client:
                assert client.run(Send(Ping(token=7)), Receive()) == [Pong(token=7)]
            with LyingClient(path) as client:
                try:
                    client.run(Send(Ping(token=7)), Receive())
                except PeerClosed as error:
                    assert error.mid_frame

To test a client, put a :class:`LyingDaemon` at the place's socket path and attach; to test a daemon, point a
:class:`LyingClient` at its socket.

- Steps: ``Send`` and ``Receive`` (and ``ReceiveToEnd``, ``AnswerPings``, ``AnswerSwitches``) are honest.
  ``SendRaw`` sends any bytes with any descriptors, ``Drip`` a few bytes at a time, ``Flood`` until the socket is full,
  ``Repeat`` does a step for ever, ``Stall`` says nothing, ``HalfClose``, ``Close`` and ``Reset`` end the connection,
  ``Die`` ends the daemon. A step of one's own is any object with ``run(wire)``.
- :func:`frame` makes a frame's bytes with any part replaced. To cut a frame short, slice it; to merge two, add them; to
  announce descriptors that do not come, ``frame(message, fd_count=3)``. :func:`frame_lies` is a collection that every
  reader must refuse.
- :func:`honest_grant` is a whole, valid grant of a few tensors: lie from there on, about one thing at a time.
- Of the control plane: :func:`frame` and :func:`frame_lies` make its messages too, and ``LyingCommands``, of the module
  ``testing.commands``, answers questions as it is told; ``LyingEvents``, of ``testing.events``, tells listeners what a
  script says.
- A :class:`Gate` tells the test how far a script came (``Open``), and the script when to go on (``Stall``).
"""

from weightcached.protocol.testing.actors import LyingClient, LyingDaemon, Script
from weightcached.protocol.testing.frames import frame, frame_lies, nested_lists, pickle_that_creates
from weightcached.protocol.testing.grants import HonestGrant, TensorBytes, honest_grant, sealed_memory
from weightcached.protocol.testing.steps import (
    AnswerPings,
    AnswerSwitches,
    Close,
    Die,
    Drip,
    Flood,
    Gate,
    HalfClose,
    Open,
    Receive,
    ReceiveToEnd,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Stall,
    Step,
    Wire,
)

__all__ = [
    "AnswerPings",
    "AnswerSwitches",
    "Close",
    "Die",
    "Drip",
    "Flood",
    "Gate",
    "HalfClose",
    "HonestGrant",
    "LyingClient",
    "LyingDaemon",
    "Open",
    "Receive",
    "ReceiveToEnd",
    "Repeat",
    "Reset",
    "Script",
    "Send",
    "SendRaw",
    "Stall",
    "Step",
    "TensorBytes",
    "Wire",
    "frame",
    "frame_lies",
    "honest_grant",
    "nested_lists",
    "pickle_that_creates",
    "sealed_memory",
]
