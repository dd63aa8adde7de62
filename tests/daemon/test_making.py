"""What was made for a change goes into the vault; what is kept for rollback makes room where the vault is full, and
only there. The custody, the vault and the socket are real; the service manager at its other end is one that hangs.
"""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.generations import generation
from weightcached.daemon import notify
from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.custody import Custody
from weightcached.daemon.holdings import Holdings
from weightcached.daemon.making import Making
from weightcached.daemon.notify import Notifier
from weightcached.daemon.progress import Lines, ProgressTracker
from weightcached.daemon.state_record import PreparedRecord, StateFile
from weightcached.daemon.vault import NotifyVault
from weightcached.protocol.errors import ManagerUnreachable
from weightcached.protocol.fds import OwnedFds

WAITING = PreparedRecord(transaction="1" * 32, generation="0" * 32, leader="host-tp0of1")


class _Spares:
    """What is kept for rollback, as far as making room goes."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def make_room(self) -> bool:
        self.count -= 1
        return self.count >= 0


@pytest.fixture
def notifier() -> Iterator[Notifier]:
    """To a manager that takes what it is told, and never acts upon it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        yield Notifier(ours, watchdog_s=None, supervised=False)


def entrust(vault: Any, spares: _Spares) -> None:
    custody = Custody(vault, Holdings(), StateFile.create())
    record = SimpleNamespace(progress=ProgressTracker(Lines()))
    making = Making(record, ChangeCustody(custody), spares, SimpleNamespace())  # type: ignore[arg-type]
    with socket.socket() as something:
        made = generation(memory=OwnedFds([something.detach()]))
    try:
        with pytest.raises(ManagerUnreachable):
            asyncio.run(making.entrust(made, WAITING))
        assert custody.record.prepared is None
        assert custody.record.generations == ()
    finally:
        made.memory.close()
        custody.close()


def test_a_manager_that_hangs_costs_nothing_that_is_kept_for_rollback(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.2)
    spares = _Spares(3)
    entrust(NotifyVault(notifier, handed=(), store_max=100, unit=None), spares)
    assert spares.count == 3


def test_a_full_store_costs_all_of_it_before_a_change_is_refused(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acted_upon(**_: Any) -> None:
        """As far as this manager says."""

    monkeypatch.setattr(notifier, "barrier", acted_upon)
    spares = _Spares(3)
    entrust(NotifyVault(notifier, handed=(), store_max=0, unit=None), spares)
    assert spares.count == -1
