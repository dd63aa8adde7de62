"""The state record: whatever happens to one slot, the other counts; whatever is in the memfd, nothing breaks."""

import fcntl
import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcached.daemon.state_record import (
    NBYTES,
    PROVEN_MAX,
    SLOT_NBYTES,
    BoundSocket,
    CommittedRecord,
    GenerationRecord,
    LedgerRecord,
    PreparedRecord,
    ReceiptsRecord,
    StateFile,
    StateRecord,
)
from weightcached.protocol.config import Provenance
from weightcached.protocol.errors import TransferError
from weightcached.protocol.messages import AccountingCounts


def generation(**changes: object) -> GenerationRecord:
    record = GenerationRecord(
        id="a" * 32,
        manifest_sha256="b" * 64,
        manifest_nbytes=1000,
        segments_nbytes=(4096, 1 << 40),
        resident_nbytes=4000,
        bytes_read=3000,
        accounting=AccountingCounts(expected=2, loaded=2, ignored=1, unexpected=0),
        receipts=ReceiptsRecord(sha256="c" * 64, trusted=True, rule="ext4 is trusted"),
        digest="d" * 64,
        provenance=Provenance(path="/models/ä", host="h", revision="r", tokenizer_sha256=None),
        seconds={"read": 1.5},
        model_dir="/models/ä",
        hub_id="org/name",
        proven_receipts=("e" * 64,),
        under_model="/models/before",
        pushed_by="a trainer",
        staged=True,
    )
    return record.model_copy(update=changes)


FULL = StateRecord(
    starts=7,
    adoptions=3,
    adoption_attempts=1,
    examining="f" * 32,
    current="a" * 32,
    generations=(generation(), generation(id="f" * 32, digest=None, hub_id=None)),
    quarantined=("1" * 32,),
    pins=("2" * 32,),
    vault_id="4" * 32,
    after_loss=True,
    prepared=PreparedRecord(transaction="5" * 32, generation="3" * 32, leader="host-tp0of2", keep=2),
    ledger=LedgerRecord(
        open="6" * 32,
        committed=(CommittedRecord(transaction="7" * 32, version="digest:1", receipts_version="receipts:1"),),
        aborted=("8" * 32,),
    ),
    keep=3,
    bound=BoundSocket(device=1 << 40, inode=1 << 62),
)


@pytest.fixture
def state() -> Iterator[StateFile]:
    created = StateFile.create()
    yield created
    created.close()


def reopened(state: StateFile) -> StateFile:
    """As the next keeper finds it."""
    return StateFile.open(os.dup(state.fd))


def slot_of(state: StateFile) -> int:
    return state.sequence % 2 * SLOT_NBYTES


def test_everything_comes_back(state: StateFile) -> None:
    state.write(FULL)
    again = reopened(state)
    assert again.record == FULL
    assert again.damage is None
    assert again.sequence == state.sequence
    again.close()


def test_the_newer_slot_counts_and_the_older_is_written(state: StateFile) -> None:
    for starts in range(2, 7):
        older = state.record
        state.write(state.record.model_copy(update={"starts": starts}))
        again = reopened(state)
        assert again.record.starts == starts
        again.close()
        os.pwrite(state.fd, b"\0" * 100, slot_of(state))  # the newer is destroyed: the one before it is still there
        again = reopened(state)
        assert again.record == older
        again.write(state.record)
        again.close()
        state = StateFile.open(os.dup(state.fd))


@settings(max_examples=60)
@given(st.data())
def test_one_flipped_bit_is_noticed_wherever_it_is(data: st.DataObject) -> None:
    state = StateFile.create()
    state.write(FULL)
    nbytes = len(os.pread(state.fd, SLOT_NBYTES, slot_of(state)).rstrip(b"\0"))
    offset = slot_of(state) + data.draw(st.integers(0, nbytes - 1))
    [byte] = os.pread(state.fd, 1, offset)
    os.pwrite(state.fd, bytes([byte ^ 1 << data.draw(st.integers(0, 7))]), offset)
    again = reopened(state)
    assert again.record == StateRecord()  # what was written before
    assert again.damage is None
    again.close()
    state.close()


@pytest.mark.parametrize("kept", [0, 1, 8, 20, 51, 52, 53, 400])
def test_a_half_written_record_leaves_the_one_before(state: StateFile, kept: int) -> None:
    state.write(FULL)
    state.write(FULL.model_copy(update={"starts": 8}))
    new = os.pread(state.fd, SLOT_NBYTES, slot_of(state))
    old = os.pread(state.fd, SLOT_NBYTES, slot_of(state))[::-1]
    os.pwrite(state.fd, new[:kept] + old[kept:], slot_of(state))
    again = reopened(state)
    assert again.record == FULL
    again.close()


def test_with_both_slots_destroyed_it_is_as_good_as_new_and_says_so(state: StateFile) -> None:
    state.write(FULL)
    os.pwrite(state.fd, secrets.token_bytes(NBYTES), 0)
    again = reopened(state)
    assert again.record == StateRecord()
    assert "slot 0: not the magic" in str(again.damage)
    again.write(FULL)
    assert again.damage is None
    again.close()
    third = reopened(state)
    assert third.record == FULL
    third.close()


def test_a_slot_moved_to_the_other_place_does_not_count(state: StateFile) -> None:
    state.write(FULL)
    data = os.pread(state.fd, SLOT_NBYTES, slot_of(state))
    os.pwrite(state.fd, b"\0" * NBYTES, 0)
    os.pwrite(state.fd, data, SLOT_NBYTES - slot_of(state))
    again = reopened(state)
    assert "a record of the other slot" in str(again.damage)
    again.close()


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 1))
def test_no_bytes_are_more_than_damage(noise: bytes, slot: int) -> None:
    state = StateFile.create()
    os.pwrite(state.fd, b"\0" * NBYTES, 0)
    os.pwrite(state.fd, noise, slot * SLOT_NBYTES)
    again = reopened(state)
    assert again.record == StateRecord()
    assert again.damage is not None
    again.close()
    state.close()


def test_a_record_that_does_not_fit_changes_nothing(state: StateFile) -> None:
    many = tuple(f"{number:064x}" for number in range(PROVEN_MAX))
    fits = FULL.model_copy(update={"generations": tuple(generation(proven_receipts=many) for _ in range(3))})
    state.write(fits)
    with pytest.raises(ValueError, match="does not fit"):
        state.write(fits.model_copy(update={"generations": fits.generations * 2}))
    again = reopened(state)
    assert again.record == fits
    again.close()


def test_it_can_be_written_and_not_resized(state: StateFile) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(state.fd, NBYTES + 1)
    with pytest.raises(PermissionError):
        os.ftruncate(state.fd, 0)
    assert not fcntl.fcntl(state.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE


def test_a_memfd_that_is_none_of_ours_is_refused_and_left_alone() -> None:
    fd = os.memfd_create("weightcached:state", os.MFD_ALLOW_SEALING)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(TransferError, match="not a state memfd"):
            StateFile.open(fd)
        os.ftruncate(fd, NBYTES)
        with pytest.raises(TransferError, match="sealed against resizing"):
            StateFile.open(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(TransferError, match="cannot be written"):
            StateFile.open(reading)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(TransferError, match="not a state memfd"):
            StateFile.open(fd)
        os.fstat(fd)  # still open
        with pytest.raises(TransferError, match="not in a memfd"):
            StateFile.open(0)
    finally:
        os.close(fd)
        os.close(reading)


def test_a_field_that_this_release_does_not_know_is_damage_and_not_a_guess(state: StateFile) -> None:
    os.pwrite(state.fd, b"\0" * NBYTES, 0)
    state.write(_Dumped({**FULL.model_dump(), "from_the_future": 1}))  # type: ignore[arg-type]
    again = reopened(state)
    assert "not a record that this release understands" in str(again.damage)
    again.close()


class _Dumped:
    """Something that is written as ``fields``."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    def model_dump(self) -> dict[str, object]:
        return self._fields
