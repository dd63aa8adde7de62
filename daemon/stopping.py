"""When a signal may stop the keeper: from when it can stop in order, until it has.

Owns the mask of this thread for the two signals that mean stop. One that comes earlier waits; one that comes after the
end changes nothing. Without that, a stop during the start (or a second one at the end) would leave a socket file, and a
listener in a vault, behind which nobody answers.
"""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_signals(*, block: bool) -> None:
    """Hold them back, or let them come. Processes that are started meanwhile inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK if block else signal.SIG_UNBLOCK, STOP_SIGNALS)
