"""What a keeper has to tell the next one: a small record in a memfd that the vault keeps beside the weights.

Owns the record's form and the file it lies in: two slots, each with a magic, a sequence number, a length and a
checksum. A new record goes into the slot of the older one, so that whoever is killed while writing leaves the other
intact; the valid slot with the higher number counts. The memfd is sealed against growing and shrinking only. What is
put into the record, and when, is ``custody.py``'s business; a config is in its manifest and not here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightcached.protocol.config import Provenance
from weightcached.protocol.errors import TransferError
from weightcached.protocol.messages import (
    GRANT_SEGMENTS_MAX,
    AccountingCounts,
    Count,
    Hex32,
    Hex64,
    LongText,
    Seconds,
    ShortText,
)
from weightcached.protocol.transaction import ABORTED_MAX, COMMITTED_MAX

MEMFD_NAME = "weightcached:state"
MAGIC = b"WCDSTAT1"
SLOT_NBYTES = 256 * 1024
NBYTES = 2 * SLOT_NBYTES
PROVEN_MAX = 1024
"""Foreign receipts that are remembered for a generation; the newest."""

_HEADER = struct.Struct("<8sQI32s")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class ReceiptsRecord(_Frozen):
    """``generation.CheckpointReceipts``, kept."""

    sha256: Hex64
    trusted: bool
    rule: LongText


class GenerationRecord(_Frozen):
    """What is known about a generation that its manifest does not say, or must agree with."""

    id: Hex32
    manifest_sha256: Hex64
    manifest_nbytes: Count
    segments_nbytes: Annotated[tuple[Count, ...], Field(strict=False, max_length=GRANT_SEGMENTS_MAX)]
    resident_nbytes: Count
    bytes_read: Count
    accounting: AccountingCounts
    receipts: ReceiptsRecord
    digest: Hex64 | None
    provenance: Provenance
    seconds: dict[str, Seconds]
    model_dir: LongText
    """Where it was loaded from: an absolute path."""
    hub_id: ShortText | None
    """What ``--model`` said, where it was a hub id and not that path."""
    engine_inputs: Hex64 | None = None
    """What the key of the engine that made the layout was computed from."""
    proven_receipts: Annotated[tuple[Hex64, ...], Field(strict=False, max_length=PROVEN_MAX)] = ()
    """Of other views of its files (other mounts), oldest first."""
    under_model: LongText | None = None
    """What ``--model`` said when these weights came by a change, and not because of ``--model``."""
    pushed_by: ShortText | None = None
    """Who pushed them; ``None`` for weights out of a checkpoint."""
    staged: bool = False
    """They were never served: they are what a change has prepared, or what is left of one."""


class PreparedRecord(_Frozen):
    """A change that is finished here and whose decision has not been read. ``keep``: how many generations besides the
    new one are kept once it is committed; the daemon's own setting where ``None``.
    """

    transaction: Hex32
    generation: Hex32
    leader: ShortText
    keep: Count | None = None


class CommittedRecord(_Frozen):
    transaction: Hex32
    version: ShortText
    receipts_version: ShortText


class LedgerRecord(_Frozen):
    """``transaction.Ledger``, kept."""

    open: Hex32 | None = None
    committed: Annotated[tuple[CommittedRecord, ...], Field(strict=False, max_length=COMMITTED_MAX)] = ()
    aborted: Annotated[tuple[Hex32, ...], Field(strict=False, max_length=ABORTED_MAX)] = ()


class BoundSocket(_Frozen):
    """The socket file that the kept listener is behind."""

    device: Count
    inode: Count


class StateRecord(_Frozen):
    """Everything. ``ledger`` is the leader's; elsewhere it stays empty."""

    format: Literal[1] = 1
    vault_id: Hex32 | None = None
    """Made with the record: another one than before, and what was written then is lost."""
    after_loss: bool = False
    """It was begun while the vault held generations, and none has been served since: nothing says what they are."""
    starts: Count = 0
    """Keepers that have opened this record."""
    adoptions: Count = 0
    adoption_attempts: Count = 0
    """Begun since the last one that ended."""
    examining: Hex32 | None = None
    """The generation that an adoption looked at last, and has not ended since: where it crashed, that one is why."""
    current: Hex32 | None = None
    """The generation that is served, or was last."""
    generations: Annotated[tuple[GenerationRecord, ...], Field(strict=False)] = ()
    """Those whose descriptors were, or were about to be, put into the vault, in the order in which they were served."""
    quarantined: Annotated[tuple[Hex32, ...], Field(strict=False)] = ()
    pins: Annotated[tuple[Hex32, ...], Field(strict=False)] = ()
    prepared: PreparedRecord | None = None
    ledger: LedgerRecord = LedgerRecord()
    keep: Count | None = None
    """How many generations besides the current one are kept; the daemon's own setting where ``None``."""
    bound: BoundSocket | None = None

    def generation(self, generation_id: str) -> GenerationRecord | None:
        """The record of that generation, if there is one."""
        return next((one for one in self.generations if one.id == generation_id), None)

    def without_history(self) -> StateRecord:
        """The same without what can be found out again (proven receipts), or is hardly asked for any more (all but the
        last of what was aborted)."""
        bare = tuple(one.model_copy(update={"proven_receipts": ()}) for one in self.generations)
        ledger = self.ledger.model_copy(update={"aborted": self.ledger.aborted[-1:]})
        return self.model_copy(update={"generations": bare, "ledger": ledger})

    @property
    def room_nbytes(self) -> int:
        """What is left of a slot once this is in it; negative where it does not fit."""
        return SLOT_NBYTES - _HEADER.size - len(msgpack.packb(self.model_dump()))


class StateFile:
    """Owns ``fd``, a memfd of two slots. Made by :meth:`create` and :meth:`open`."""

    def __init__(self, fd: int, record: StateRecord, sequence: int, damage: str | None) -> None:
        self.fd = fd
        self.record = record
        """What was last read or written."""
        self.damage = damage
        """Why nothing could be read, in words; the record is then an empty one."""
        self._sequence = sequence

    @classmethod
    def create(cls) -> StateFile:
        """A new one with an empty record, which is written."""
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, NBYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            created = cls(fd, StateRecord(), 0, None)
            created.write(StateRecord())
        except BaseException:
            os.close(fd)
            raise
        return created

    @classmethod
    def open(cls, fd: int) -> StateFile:
        """The record in a memfd that a vault handed back; takes ``fd``. Where no slot is valid the file is as good as
        new, and says so in ``damage``. Raises TransferError for a memfd that is none of ours, and leaves it alone.
        """
        require_state_memfd(fd)
        valid = []
        problems = []
        for slot in range(2):
            try:
                valid.append(_read(fd, slot))
            except _Damaged as error:
                problems.append(f"slot {slot}: {error}")
        if not valid:
            return cls(fd, StateRecord(), 0, "; ".join(problems))
        sequence, record = max(valid, key=lambda found: found[0])
        return cls(fd, record, sequence, None)

    @property
    def sequence(self) -> int:
        """Of the record that counts; 0 where there is none."""
        return self._sequence

    def write(self, record: StateRecord) -> None:
        """Make it the one that counts. Raises ValueError for one that does not fit into a slot: nothing is changed."""
        payload = msgpack.packb(record.model_dump())
        if len(payload) > SLOT_NBYTES - _HEADER.size:
            raise ValueError(f"a state record of {len(payload)} bytes does not fit into a slot of {SLOT_NBYTES}")
        sequence = self._sequence + 1
        data = _HEADER.pack(MAGIC, sequence, len(payload), _checksum(sequence, payload)) + payload
        offset = sequence % 2 * SLOT_NBYTES
        if os.pwrite(self.fd, data, offset) != len(data):
            raise OSError("a state record was written in part only")
        self._sequence, self.record, self.damage = sequence, record, None

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def require_state_memfd(fd: int) -> None:
    """Raises TransferError unless ``fd`` can be read and written, cannot be resized, and has the size of two slots."""
    found = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError("the state is not in a memfd", found=error.strerror) from error
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if found.st_size != NBYTES or seals & wanted != wanted or seals & fcntl.F_SEAL_WRITE:
        raise TransferError(
            "not a state memfd",
            expected=f"{NBYTES} bytes, sealed against resizing and not against writing",
            found=f"{found.st_size} bytes, seals {seals:#x}",
        )
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise TransferError("the state cannot be written through its descriptor")


class _Damaged(Exception):
    """A slot without a valid record. Says what is wrong with it."""


def _read(fd: int, slot: int) -> tuple[int, StateRecord]:
    data = os.pread(fd, SLOT_NBYTES, slot * SLOT_NBYTES)
    magic, sequence, nbytes, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _Damaged("nothing was written there" if not any(data[: _HEADER.size]) else "not the magic of this format")
    payload = data[_HEADER.size : _HEADER.size + nbytes]
    if len(payload) != nbytes or _checksum(sequence, payload) != checksum:
        raise _Damaged("the checksum does not match")
    if sequence % 2 != slot:
        raise _Damaged("a record of the other slot")
    try:
        value = msgpack.unpackb(payload, strict_map_key=True, max_ext_len=0)
        return sequence, StateRecord.model_validate(value)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else error
        raise _Damaged(f"not a record that this release understands: {problem}"[:500]) from error


def _checksum(sequence: int, payload: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<QI", sequence, len(payload)) + payload).digest()
