"""Frames and messages: whatever comes, in any pieces, is a valid message or one of two errors; nothing is kept."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.fuzzing import MIB, MSGPACK_VALUES, altered, damaged, ends_in, packed, plain
from tests.support.resources import open_fds
from tests.support.wires import HELLO
from weightcached.protocol import control, messages, push_messages, worker_messages
from weightcached.protocol.config import Provenance
from weightcached.protocol.control import (
    CONTROL_ANSWERS,
    CONTROL_EVENTS,
    CONTROL_REQUESTS,
    AwaitChange,
    ChangeInfo,
    ControlEvent,
    Decide,
    Decided,
    Describe,
    Drop,
    FromCheckpoint,
    Open,
    Pin,
    Prepare,
    RankInfo,
    RankState,
    ReadDecision,
    Resolve,
)
from weightcached.protocol.errors import ContractError, ProtocolError
from weightcached.protocol.framing import HEADER, Frame, FrameReceiver, Header, PeerClosed, decode_body, encode_frame
from weightcached.protocol.messages import (
    BUCKET_MIN_NBYTES,
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    AccountingCounts,
    Dialect,
    DifferingField,
    Durations,
    Event,
    GenerationInfo,
    GiveUp,
    Grant,
    LeaseInfo,
    Loading,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Released,
    Report,
    Resume,
    SegmentInfo,
    Stage,
    Staged,
    Status,
    Switch,
    Unproven,
)
from weightcached.protocol.push_messages import (
    TRAINER_TO_WORKER,
    WORKER_TO_TRAINER,
    Assign,
    Bucket,
    Filled,
    Finish,
    Free,
    Piece,
    PushedBox,
    Wanted,
    WantedTensor,
)
from weightcached.protocol.transaction import Outcome
from weightcached.protocol.worker_messages import (
    KEEPER_TO_WORKER,
    WORKER_TO_KEEPER,
    Done,
    Failed,
    Job,
    Memory,
    Planned,
    Progress,
)

COUNTS = AccountingCounts(expected=3, loaded=2, ignored=1, unexpected=0)
REPORT = Report(
    daemon_version="0.1.0",
    pid=1,
    place="default/host-tp0of1",
    socket_path="/run/weightcached/default/host-tp0of1.sock",
    model="/models/one",
    layout="hf",
    tp_rank=0,
    tp_size=1,
    dtype="auto",
    quantization="none",
    memory="host",
    state="ready",
    stage="ready",
    bytes_done=1,
    bytes_total=2,
    bytes_per_s=0.5,
    resident_nbytes=100,
    own_memory_nbytes=200,
    generation="a" * 32,
    version="digest:1",
    fingerprint="b" * 64,
    digest=None,
    leases=(LeaseInfo(pid=7, uid=8, name="engine", age_s=1.5),),
    lease_count=1,
    last_error=None,
    uptime_s=9.0,
    load_seconds={"load": 1.0},
    bytes_read=100,
    attaches={"granted": 1},
    attach_durations=Durations(bounds_s=(0.1, 1.0), counts=(1, 2, 3), total_s=4.0),
)
STATE = RankState(
    rank=RankInfo(place="host-tp0of2", tp_rank=0, tp_size=2, pp_rank=0, pp_size=1, ep_rank=0, ep_size=1),
    state="ready",
    vault_id="d" * 32,
    fingerprint="b" * 64,
    current="a" * 32,
    generations=(
        GenerationInfo(
            generation="a" * 32,
            version="digest:1",
            receipts_version="receipts:1",
            standing="current",
            origin="/models/one",
            digest=None,
            resident_nbytes=100,
            leases=1,
            pinned=False,
            age_s=5.0,
        ),
    ),
    change=ChangeInfo(transaction="c" * 32, state="prepared", generation="e" * 32, leader="host-tp0of2"),
    open="c" * 32,
)
HONEST: dict[str, tuple[Dialect, Message]] = {
    f"{dialect.name}: {type(message).__name__}": (dialect, message)
    for dialect, tried in (
        (
            CLIENT_TO_DAEMON,
            [
                HELLO,
                Resume(client_version="0", name="engine", pid=1, generation="a" * 32, manifest_sha256="b" * 64),
                Release(),
                Switch(generation="a" * 32),
                Stage(
                    client_version="0",
                    name="trainer",
                    pid=1,
                    transaction="c" * 32,
                    timeout_s=60.0,
                    bucket_nbytes=BUCKET_MIN_NBYTES,
                    bucket_count=2,
                ),
                GiveUp(reason="a tensor is missing"),
                Status(),
                Ping(token=5),
            ],
        ),
        (
            DAEMON_TO_CLIENT,
            [
                REPORT,
                Grant(
                    generation="a" * 32,
                    version="digest:0",
                    receipts_version="receipts:0",
                    nonce="b" * 32,
                    manifest_sha256="c" * 64,
                    manifest_nbytes=100,
                    segments=(SegmentInfo(memory="host", nbytes=256),),
                    resident_nbytes=256,
                    accounting=COUNTS,
                    digest=None,
                    provenance=Provenance(path="/models/one", host="here"),
                ),
                Loading(stage="load", bytes_done=1, bytes_total=2, bytes_per_s=0.5),
                Unproven(reason="receipts differ", rule="ext4"),
                Refused(
                    code="config_mismatch",
                    message="no",
                    fields=(DifferingField(name="dtype", present=True, value=[1, {"a": None}]),),
                ),
                Pong(token=5),
                Event(kind="published", generation="a" * 32, message="there"),
                Released(generations=1, resident_nbytes=2),
                Staged(generation="a" * 32, base_version="digest:0", bucket_nbytes=4096, bucket_count=2),
            ],
        ),
        (
            KEEPER_TO_WORKER,
            [
                Job(model_dir="/models/one", config={"dtype": "auto"}, generation="a" * 32, keeper_pid=1),
                Memory(version="digest:0", receipts_version="receipts:0", digest=None),
            ],
        ),
        (
            WORKER_TO_KEEPER,
            [
                Planned(
                    segments_nbytes=(256,),
                    bytes_to_read=1,
                    receipts="c" * 64,
                    receipts_trusted=True,
                    receipts_young=False,
                    accounting=COUNTS,
                ),
                Progress(stage="load", bytes_done=1, bytes_total=2),
                Done(manifest_nbytes=1, resident_nbytes=2, bytes_read=3, bytes_kept=3, seconds={"load": 0.5}),
                Failed(code="bad_header", message="no"),
            ],
        ),
        (
            TRAINER_TO_WORKER,
            [
                Bucket(number=1, pieces=(Piece(tensor=0, start=(0, 2), shape=(1, 2), offset=64, xxh3="f" * 32),)),
                Finish(pieces=1),
                Assign(version="assigned:1"),
            ],
        ),
        (
            WORKER_TO_TRAINER,
            [
                Wanted(
                    tensors=(
                        WantedTensor(
                            name="w",
                            dtype="bfloat16",
                            shape=(2, 4),
                            same_as=((8,),),
                            boxes=(PushedBox(start=(0, 2), shape=(1, 2)),),
                        ),
                    ),
                    last=True,
                ),
                Free(number=1),
                Filled(resident="b" * 64, pushed_nbytes=4, kept_nbytes=0, unchanged=False),
            ],
        ),
        (
            CONTROL_REQUESTS,
            [
                Describe(),
                Open(transaction="c" * 32, base="a" * 32),
                Prepare(
                    transaction="c" * 32,
                    leader="host-tp0of2",
                    base="a" * 32,
                    source=FromCheckpoint(model_dir="/models/two"),
                ),
                AwaitChange(transaction="c" * 32, timeout_s=1.5),
                Decide(transaction="c" * 32, commit=True),
                ReadDecision(transaction="c" * 32),
                Resolve(transaction="c" * 32),
                Pin(generation="a" * 32, pinned=True),
                Drop(generation="a" * 32),
                Status(),
            ],
        ),
        (
            CONTROL_ANSWERS,
            [
                STATE,
                Decided(transaction="c" * 32, outcome=Outcome.OPEN, vault_id="d" * 32),
                Refused(code="update_conflict", message="no"),
                REPORT,
            ],
        ),
        (
            CONTROL_EVENTS,
            [
                ControlEvent(
                    kind="snapshot",
                    nonce="a" * 32,
                    sequence=1,
                    place="default/host-tp0of2",
                    time_s=1.5,
                    state="ready",
                    drops=("kv_cache",),
                    rank_state=STATE,
                )
            ],
        ),
    )
    for message in tried
}
MEMORY_MAX_BYTES = {
    CLIENT_TO_DAEMON.name: 6 * MIB,  # a keeper has to stay below 64, whoever asks
    DAEMON_TO_CLIENT.name: 128 * MIB,
    KEEPER_TO_WORKER.name: 128 * MIB,
    WORKER_TO_KEEPER.name: 12 * MIB,
    TRAINER_TO_WORKER.name: 128 * MIB,
    WORKER_TO_TRAINER.name: 128 * MIB,
    CONTROL_REQUESTS.name: 6 * MIB,  # a keeper's too
    CONTROL_ANSWERS.name: 128 * MIB,
    CONTROL_EVENTS.name: 128 * MIB,
}


def test_every_message_is_tried() -> None:
    dialects = [
        value
        for module in (control, messages, push_messages, worker_messages)
        for value in vars(module).values()
        if isinstance(value, Dialect)
    ]
    assert {dialect.name for dialect in dialects} == set(MEMORY_MAX_BYTES)
    assert {f"{dialect.name}: {kind.__name__}" for dialect in dialects for kind in dialect.types.values()} == set(
        HONEST
    )


def decoded(dialect: Dialect, number: int, body: bytes) -> Message | None:
    """The message, which can be sent again as it is, or ``None`` for what is none."""
    message = ends_in(
        ProtocolError,
        lambda: decode_body(dialect, Header(number, len(body), 0), body),
        memory_max_nbytes=MEMORY_MAX_BYTES[dialect.name],
    )
    if message is not None:
        again = encode_frame(dialect, message)
        assert repr(decode_body(dialect, Header(number, len(again) - HEADER.size, 0), again[HEADER.size :])) == repr(
            message
        )
    return message


@given(st.sampled_from(sorted(HONEST)), st.data())
def test_a_body_of_altered_fields_is_a_message_or_a_protocol_error(name: str, data: st.DataObject) -> None:
    dialect, message = HONEST[name]
    fields: Any = data.draw(altered(plain(message.model_dump()), MSGPACK_VALUES))
    decoded(dialect, dialect.number_of(message), packed(fields))


@given(st.sampled_from(sorted(HONEST)), st.data())
def test_a_damaged_body_is_a_message_or_a_protocol_error(name: str, data: st.DataObject) -> None:
    dialect, message = HONEST[name]
    body = data.draw(damaged(encode_frame(dialect, message)[HEADER.size :]))
    decoded(dialect, dialect.number_of(message), body[: dialect.body_max_bytes])


@pytest.mark.parametrize(
    "name",
    [
        f"{CLIENT_TO_DAEMON.name}: Hello",
        f"{DAEMON_TO_CLIENT.name}: Report",
        f"{WORKER_TO_KEEPER.name}: Planned",
        f"{CONTROL_REQUESTS.name}: Prepare",
    ],
)
@pytest.mark.parametrize("start", [b"", b"\x81\xa6config", b"\x81\xa6leases"])
@pytest.mark.parametrize("size", [b"\xdc\x01\xff", b"\xdc\x10\x00", b"\xdd\x00\x03\xff\xff", b"\xdd\xff\xff\xff\xff"])
def test_lists_that_promise_much_in_lists_that_promise_much(name: str, start: bytes, size: bytes) -> None:
    """Found: room for all that a list promises is made before it is read. 3 KiB cost a keeper 28 MiB and 80 ms."""
    dialect, message = HONEST[name]
    body = start + size * 1000 + b"\xc0" * 50_000
    assert decoded(dialect, dialect.number_of(message), body) is None


@given(st.sampled_from(sorted(HONEST)), st.data())
def test_damaged_frames_in_any_pieces_are_frames_or_errors(name: str, data: st.DataObject) -> None:
    """Through a socket, with descriptors beside them where the direction has any."""
    dialect, message = HONEST[name]
    fds = data.draw(st.integers(0, dialect.fds_max if dialect.fds_max < 4 else 4))
    stream = encode_frame(dialect, message, fd_count=min(fds, dialect.fds_max)) * data.draw(st.integers(1, 2))
    stream = data.draw(damaged(stream))[:100_000]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    before = open_fds()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        receiver = FrameReceiver(dialect)
        try:
            ends_in(
                (ContractError, PeerClosed),
                lambda: _send_and_receive(near, far, receiver, stream, cuts, fds),
                memory_max_nbytes=MEMORY_MAX_BYTES[dialect.name],
            )
        finally:
            receiver.close()
    assert open_fds() == before


def _send_and_receive(
    near: socket.socket, far: socket.socket, receiver: FrameReceiver, stream: bytes, cuts: list[int], fds: int
) -> None:
    left = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if end > start]
    while left:
        piece = left.pop(0)
        sent = socket.send_fds(near, [piece], [0] * fds)
        fds = 0
        if sent < len(piece):
            left.insert(0, piece[sent:])
        _receive_all(far, receiver)
    near.close()
    while True:
        _receive(far, receiver)


def _receive_all(far: socket.socket, receiver: FrameReceiver) -> None:
    try:
        while True:
            _receive(far, receiver)
    except BlockingIOError:
        pass


def _receive(far: socket.socket, receiver: FrameReceiver) -> Frame | None:
    frame = receiver.step(far)
    if frame is not None:
        frame.fds.close()
    return frame


@given(st.binary(max_size=64))
@example(os.urandom(16))
def test_no_header_takes_memory(data: bytes) -> None:
    for dialect, _ in HONEST.values():
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with near, far:
            near.sendall(data)
            near.close()
            far.setblocking(False)
            receiver = FrameReceiver(dialect)

            def receive(receiver: FrameReceiver = receiver, far: socket.socket = far) -> None:
                while True:
                    _receive(far, receiver)

            ends_in((ContractError, PeerClosed), receive, memory_max_nbytes=dialect.body_max_bytes + MIB)
            receiver.close()
