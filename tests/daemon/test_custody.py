"""The record that custody keeps. When it is nearly full, what begins something is refused, and what ends it is written.
When keepers die adopting, what they looked at is quarantined.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.support.generations import generation
from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.custody import ATTEMPTS_MAX, DECISION_NBYTES, Custody
from weightcached.daemon.holdings import Holdings
from weightcached.daemon.kept_state import record_of
from weightcached.daemon.listen_fds import HandedOver
from weightcached.daemon.state_record import (
    PROVEN_MAX,
    SLOT_NBYTES,
    CommittedRecord,
    LedgerRecord,
    PreparedRecord,
    StateFile,
)
from weightcached.daemon.vault import NoVault
from weightcached.protocol.errors import InsufficientMemory
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import names
from weightcached.protocol.transaction import ABORTED_MAX, COMMITTED_MAX, Held, Outcome, Prepared, Versions

TRANSACTION = "f" * 32
PREPARED = PreparedRecord(transaction=TRANSACTION, generation="0" * 32, leader="x" * 1024)


@pytest.fixture
def custody() -> Iterator[Custody]:
    made = Custody(NoVault(), Holdings(), StateFile.create())
    yield made
    made.close()


def fill(custody: Custody, *, left: int) -> None:
    """Generations until about ``left`` bytes are, with as long a history as there may be."""
    ledger = LedgerRecord(
        open=TRANSACTION,
        committed=tuple(
            CommittedRecord(transaction=f"{number:032x}", version="v" * 1024, receipts_version="r" * 1024)
            for number in range(COMMITTED_MAX - 1)
        ),
        aborted=tuple(f"{number:032x}" for number in range(100, 100 + ABORTED_MAX)),
    )
    first = record_of(generation())
    custody.change(ledger=ledger, generations=(first,))
    room = custody.record.without_history().room_nbytes - left
    each = 30_000
    more = [
        first.model_copy(update={"id": f"{number:032x}", "model_dir": "/" * (each - 2000)})
        for number in range(1, room // each)
    ]
    custody.change(generations=(first, *more))
    spare = custody.record.without_history().room_nbytes - left
    custody.change(generations=(first.model_copy(update={"model_dir": "/" * spare}), *more))


def test_pins_and_changes_are_refused_before_they_begin(custody: Custody) -> None:
    changes = ChangeCustody(custody)
    fill(custody, left=40_000)
    before = custody.record
    with pytest.raises(InsufficientMemory, match="state record"):
        changes.pin("0" * 32, pinned=True)
    with pytest.raises(InsufficientMemory, match="state record"):
        changes.require_room()
    changes.pin("0" * 32, pinned=False)
    assert custody.record == before


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.ABORTED])
def test_a_decision_is_written_however_full_the_record_is(custody: Custody, outcome: Outcome) -> None:
    """With all the history there may be, and just the room that a generation was stored with."""
    changes = ChangeCustody(custody)
    fill(custody, left=DECISION_NBYTES)
    [first, *others] = custody.record.generations
    many = tuple(f"{number:064x}" for number in range(PROVEN_MAX))
    custody.change(generations=(first.model_copy(update={"proven_receipts": many}), *others))
    assert custody.record.generations[0].proven_receipts == ()  # history made room
    changes.prepare_held(PREPARED)
    if outcome is Outcome.COMMITTED:
        held = Held(PREPARED.generation, Versions("v" * 1024, "r" * 1024))
        changes.commit(PREPARED, changes.ledger.commit(TRANSACTION, Prepared(TRANSACTION, held)))
    else:
        changes.abort(changes.ledger.abort(TRANSACTION))
    assert changes.ledger.decision(TRANSACTION).outcome is outcome
    assert custody.record.prepared is None


def test_what_never_fits_is_an_error_with_a_name_and_changes_nothing(custody: Custody) -> None:
    fill(custody, left=1000)
    before = custody.record
    first = before.generations[0]
    with pytest.raises(InsufficientMemory, match="state record"):
        custody.change(generations=(*before.generations, first.model_copy(update={"model_dir": "/" * SLOT_NBYTES})))
    assert custody.record == before


def handed_over(state_fd: int, ids: list[str]) -> HandedOver:
    """The state and the manifests of generations, as a vault hands them over."""
    manifests = [os.memfd_create(names.manifest_name(id_)) for id_ in ids]
    return HandedOver(("state", *(f"g{id_}.m" for id_ in ids)), OwnedFds([os.dup(state_fd), *manifests]))


@pytest.mark.parametrize(
    ("examined", "quarantined"),
    [("b" * 32, {"b" * 32}), (None, {"a" * 32, "b" * 32})],
    ids=["that one", "before any was looked at"],
)
def test_what_was_being_looked_at_when_three_keepers_died_is_quarantined(
    examined: str | None, quarantined: set[str]
) -> None:
    ids = ["a" * 32, "b" * 32]
    state = StateFile.create()
    generations = tuple(record_of(generation(id=id_)) for id_ in ids)
    state.write(state.record.model_copy(update={"generations": generations, "current": ids[0], "starts": 1}))
    fd = state.fd

    async def die_three_times() -> tuple[set[str], set[str], int]:
        for _ in range(ATTEMPTS_MAX):
            dying = await Custody.open(NoVault(), handed_over(fd, ids))
            assert dying.candidates.keys() == set(ids)
            if examined is not None:
                dying.examine(ids[0])
                dying.examine(examined)
            dying.close()
        next_one = await Custody.open(NoVault(), handed_over(fd, ids))
        found = set(next_one.quarantined), set(next_one.candidates), next_one.record.adoption_attempts
        next_one.close()
        return found

    left = set(ids) - quarantined
    assert asyncio.run(die_three_times()) == (quarantined, left, 1 if left else 0)
    state.close()
