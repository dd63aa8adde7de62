"""ZeroMQ sockets: their end leaves nothing, whatever comes in the middle of it."""

import signal

import zmq

from tests.support.resources import open_fds
from weightcached.protocol.control_sockets import end


def test_signals_in_the_middle_of_the_end_leave_nothing() -> None:
    """A keeper hears of the end of each of its children by a signal, and asks rank 0 at the same time."""
    before, held = signal.signal(signal.SIGALRM, lambda *_: None), len(open_fds())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00005, 0.00005)
        for _ in range(500):
            context = zmq.Context()
            asking = context.socket(zmq.DEALER)
            end(context)
            assert asking.closed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(open_fds()) == held
