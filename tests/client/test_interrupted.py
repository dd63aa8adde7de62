"""An attach that a signal interrupts (Ctrl-C, an alarm) leaves no lease, thread, descriptor or mapping.

The signal's exception is raised where it hurts most: after the grant has come, around the start of the watcher.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.test_lease import engine, lease_of, wait_for_leases
from tests.support.daemons import Daemon
from weightcached.client import WeightSet, attach

attach_module = sys.modules[attach.__module__]  # its package's attribute of that name is the function


def _interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_after_the_lease_has_begun(steady_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that nobody can close would have the lease again and again, for as long as the process lives."""
    monkeypatch.setattr(attach_module, "WeightSet", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine(steady_daemon)
    wait_for_leases(steady_daemon, 0)


@pytest.mark.parametrize("started", [False, True], ids=["before", "after"])
def test_around_the_start_of_the_watcher(steady_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    """``Thread.start`` waits for the new thread, and can be interrupted while it does."""
    start: Callable[[threading.Thread], None] = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine(steady_daemon)
    for thread in threading.enumerate():
        if thread.name == "weightcached-lease":
            thread.join(10)
            assert not thread.is_alive()
    wait_for_leases(steady_daemon, 0)


def test_before_anybody_has_looked_at_the_grant(steady_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(attach_module, "_granted", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(steady_daemon)
    with engine(steady_daemon) as weights:
        assert isinstance(weights, WeightSet)
        assert lease_of(weights).state == "connected"
    wait_for_leases(steady_daemon, 0)
