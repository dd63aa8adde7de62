"""Framing over real socket pairs: exact reads, descriptors with their frame, and nothing kept after any failure."""

import array
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forked import in_child
from tests.support.resources import nothing_left_behind
from tests.support.wires import HELLO, REQUESTS_WITH_FDS, socket_pair
from weightcached.protocol.errors import ContractError, ProtocolError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import (
    HEADER,
    Frame,
    FrameReceiver,
    FrameSender,
    PeerClosed,
    decode_body,
    decode_header,
    encode_frame,
)
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    Dialect,
    DifferingField,
    Loading,
    Ping,
    Pong,
    Refused,
    Status,
)
from weightcached.protocol.testing import frame, frame_lies

PING = Ping(token=7)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def pipe_fds() -> Iterator[list[int]]:
    with OwnedFds(os.pipe()) as fds:
        yield [fds[0], fds[1]]


def send_raw(connection: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    assert connection.sendmsg([data], control) == len(data)


def receive(connection: socket.socket, dialect: Dialect = REQUESTS_WITH_FDS) -> list[Frame]:
    """All frames that are there now. Raises what the receiver raises, and BlockingIOError when one is not whole."""
    connection.setblocking(False)
    receiver = FrameReceiver(dialect)
    frames: list[Frame] = []
    try:
        while True:
            try:
                frame = receiver.step(connection)
            except BlockingIOError:
                if receiver.mid_frame:
                    raise
                return frames
            if frame is not None:
                frames.append(frame)
    except BaseException:
        for frame in frames:
            frame.fds.close()
        raise
    finally:
        receiver.close()


# Honest frames


def test_a_header_is_sixteen_little_endian_bytes() -> None:
    data = encode_frame(REQUESTS_WITH_FDS, PING, fd_count=2)
    body = msgpack.packb({"token": 7})
    assert data == b"WCD1" + struct.pack("<HHII", 1, 3, len(body), 2) + body


@pytest.mark.parametrize("message", [PING, Status(), HELLO], ids=lambda message: type(message).__name__)
def test_a_frame_arrives_as_it_was_sent(message) -> None:
    with socket_pair() as (near, far):
        near.setblocking(False)
        assert FrameSender(encode_frame(CLIENT_TO_DAEMON, message)).step(near)
        assert [frame.message for frame in receive(far, CLIENT_TO_DAEMON)] == [message]


def test_a_frame_of_single_bytes_is_assembled() -> None:
    with socket_pair() as (near, far):
        far.setblocking(False)
        receiver = FrameReceiver(CLIENT_TO_DAEMON)
        data = encode_frame(CLIENT_TO_DAEMON, HELLO)
        for byte in data[:-1]:
            near.send(bytes([byte]))
            assert receiver.step(far) is None
            assert receiver.mid_frame
        near.send(data[-1:])
        received = receiver.step(far)
        assert received is not None
        assert received.message == HELLO
        assert not receiver.mid_frame


def test_frames_in_one_piece_come_apart() -> None:
    with socket_pair() as (near, far):
        send_raw(near, frame(PING) + frame(Status()) + frame(HELLO))
        assert [frame.message for frame in receive(far)] == [PING, Status(), HELLO]


def test_descriptors_stay_with_their_frame(pipe_fds: list[int]) -> None:
    """Two frames wait together; a read past the first's end would take the second's descriptors for its own."""
    with socket_pair() as (near, far):
        send_raw(near, frame(PING, fd_count=1), pipe_fds[:1])
        send_raw(near, frame(Status()))
        send_raw(near, frame(HELLO, fd_count=2), pipe_fds)
        frames = receive(far)
        assert [len(frame.fds) for frame in frames] == [1, 0, 2]
        for sent, received in ((pipe_fds[0], frames[0].fds[0]), (pipe_fds[1], frames[2].fds[1])):
            assert os.fstat(sent).st_ino == os.fstat(received).st_ino
        for received_frame in frames:
            received_frame.fds.close()


def test_received_descriptors_are_not_inherited(pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        send_raw(near, frame(PING, fd_count=2), pipe_fds)
        (received,) = receive(far)
        assert [os.get_inheritable(received.fds[position]) for position in (0, 1)] == [False, False]
        received.fds.close()


def test_a_large_frame_goes_out_in_pieces_with_its_descriptors_on_the_first(pipe_fds: list[int]) -> None:
    message = Refused(code="x", message="m" * 32_000, found="f" * 32_000, where="w" * 32_000)
    dialect = replace(DAEMON_TO_CLIENT, fds_max=2)
    with socket_pair() as (near, far):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for connection in (near, far):
            connection.setblocking(False)
        sender = FrameSender(encode_frame(dialect, message, fd_count=2), pipe_fds)
        receiver, received, pieces = FrameReceiver(dialect), None, 0
        while received is None:
            with suppress(BlockingIOError):
                sender.step(near)
                pieces += 1
            with suppress(BlockingIOError):
                received = receiver.step(far)
        assert pieces > 1
        assert received.message == message
        assert len(received.fds) == 2
        received.fds.close()


def test_a_receiver_goes_on_after_a_frame(pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        for _ in range(100):
            send_raw(near, frame(PING, fd_count=1), pipe_fds[:1])
        frames = receive(far)
        assert len(frames) == 100
        for received in frames:
            received.fds.close()


# What cannot be sent


@pytest.mark.parametrize(
    "message",
    [
        Refused(code="x", message="m", fields=(DifferingField(name="a", present=True, value="v" * 2**20),)),
        Refused(code="x", message="m", fields=(DifferingField(name="a", present=True, value=2**70),)),
        Refused(code="x", message="m", fields=(DifferingField(name="a", present=True, value="\ud800"),)),
    ],
    ids=["too large", "an integer over 64 bits", "text that is not Unicode"],
)
def test_what_no_frame_can_carry_is_a_protocol_error_before_anything_is_sent(message) -> None:
    with pytest.raises(ProtocolError, match="Refused"):
        encode_frame(DAEMON_TO_CLIENT, message)


def test_too_many_descriptors_are_not_sent() -> None:
    encode_frame(REQUESTS_WITH_FDS, PING, fd_count=3)
    with pytest.raises(ProtocolError, match="descriptors"):
        encode_frame(REQUESTS_WITH_FDS, PING, fd_count=4)
    with pytest.raises(ProtocolError, match="descriptors"):
        encode_frame(CLIENT_TO_DAEMON, PING, fd_count=1)


def test_a_message_of_the_other_direction_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="does not travel"):
        encode_frame(CLIENT_TO_DAEMON, Pong(token=1))


# What must not be received

LIES = frame_lies(PING, pickle_target="{target}")


@pytest.mark.parametrize("name", LIES)
def test_every_lying_frame_is_refused_at_once(name: str, tmp_path: Path) -> None:
    target = tmp_path / "pickled"
    data = frame_lies(PING, pickle_target=str(target))[name]
    with socket_pair() as (near, far):
        near.sendall(data)
        with pytest.raises(ContractError):
            receive(far, CLIENT_TO_DAEMON)
    assert not target.exists()


@pytest.mark.parametrize("name", LIES)
def test_a_lying_frame_costs_no_descriptor(name: str, pipe_fds: list[int]) -> None:
    """The descriptors came with the first byte, long before the lie is seen. The fixture counts."""
    with socket_pair() as (near, far):
        send_raw(near, LIES[name], pipe_fds)
        with pytest.raises(ContractError):
            receive(far)


@pytest.mark.parametrize("dialect", [CLIENT_TO_DAEMON, DAEMON_TO_CLIENT], ids=lambda dialect: dialect.name)
def test_the_limit_of_the_body_is_inclusive(dialect: Dialect) -> None:
    number = next(iter(dialect.types))
    limit = dialect.body_max_bytes
    assert decode_header(dialect, HEADER.pack(b"WCD1", 1, number, limit, 0)).body_nbytes == limit
    for nbytes in (limit + 1, 2**31, 2**32 - 1):
        with pytest.raises(ProtocolError, match="over the limit"):
            decode_header(dialect, HEADER.pack(b"WCD1", 1, number, nbytes, 0))


def test_an_oversized_body_is_refused_before_it_is_allocated_or_read() -> None:
    with socket_pair() as (near, far):
        near.sendall(frame(PING, body_nbytes=2**32 - 1))
        with pytest.raises(ProtocolError):
            receive(far)
        assert far.recv(100) == msgpack.packb({"token": 7})  # left where it was


def test_another_version_says_what_to_do() -> None:
    with socket_pair() as (near, far):
        near.sendall(frame(PING, version=2))
        with pytest.raises(ProtocolError, match="same weightcached release") as raised:
            receive(far)
        assert (raised.value.expected, raised.value.found) == (1, 2)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with socket_pair() as (near, far):
        near.sendall(frame(Pong(token=1)))
        with pytest.raises(ProtocolError, match="unknown message type"):
            receive(far, CLIENT_TO_DAEMON)


def items(count: int) -> bytes:
    return frame(HELLO, fields={"config": {"a": [0] * count}})


def test_the_budget_of_items_is_for_the_whole_body(monkeypatch) -> None:
    """Many small containers cost what one large one costs."""
    few = replace(CLIENT_TO_DAEMON, items_max=100)
    for data, accepted in (
        (items(50), True),
        (items(101), False),
        (frame(HELLO, fields={"config": {"a": [[]] * 50}}), False),
        (frame(HELLO, fields={"config": {"a": [{"b": 1}] * 40}}), False),
    ):
        header = decode_header(few, data[: HEADER.size])
        if accepted:
            decode_body(few, header, data[HEADER.size :])
        else:
            with pytest.raises(ProtocolError, match="limits"):
                decode_body(few, header, data[HEADER.size :])


# Descriptors that are not those announced


@pytest.mark.parametrize(("announced", "sent"), [(0, 1), (0, 3), (1, 0), (2, 1), (2, 3), (3, 0), (3, 2)])
def test_another_number_of_descriptors_is_refused(announced: int, sent: int, pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        send_raw(near, frame(PING, fd_count=announced), (pipe_fds * 2)[:sent])
        with pytest.raises(TransferError, match="number of descriptors"):
            receive(far)


def test_missing_descriptors_are_noticed_before_the_body_comes() -> None:
    with socket_pair() as (near, far):
        near.sendall(frame(PING, fd_count=1)[: HEADER.size])
        with pytest.raises(TransferError):
            receive(far)


def test_more_descriptors_than_there_is_room_for_are_refused(pipe_fds: list[int]) -> None:
    """The kernel drops those that do not fit and says so with MSG_CTRUNC; the three that fit are closed."""
    with socket_pair() as (near, far):
        send_raw(near, frame(PING, fd_count=3), (pipe_fds * 2)[:4])
        with pytest.raises(TransferError, match="no room"):
            receive(far)


def test_a_side_that_takes_no_descriptors_refuses_any(pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        send_raw(near, frame(PING), pipe_fds)
        with pytest.raises(TransferError, match="no room"):
            receive(far, CLIENT_TO_DAEMON)


@pytest.mark.parametrize("position", [1, HEADER.size - 1, HEADER.size, HEADER.size + 1])
def test_descriptors_after_the_first_byte_are_refused(position: int, pipe_fds: list[int]) -> None:
    data = frame(PING, fd_count=0)
    with socket_pair() as (near, far):
        far.setblocking(False)
        receiver = FrameReceiver(REQUESTS_WITH_FDS)
        near.sendall(data[:position])
        assert receiver.step(far) is None
        send_raw(near, data[position:], pipe_fds)
        with pytest.raises(TransferError):
            receiver.step(far)


def test_descriptors_of_a_second_frame_do_not_count_for_the_first(pipe_fds: list[int]) -> None:
    """In one sendmsg the kernel ties them to its first byte, whatever the second frame's header says."""
    with socket_pair() as (near, far):
        send_raw(near, frame(PING) + frame(PING, fd_count=1), pipe_fds[:1])
        with pytest.raises(TransferError):
            receive(far)


def test_a_process_without_free_descriptors_refuses_the_frame_and_keeps_none() -> None:
    def receive_with_few_left() -> None:
        fds = os.pipe()
        with socket_pair() as (near, far):
            send_raw(near, frame(PING, fd_count=2), list(fds))
            highest = max(near.fileno(), far.fileno(), *fds)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, highest + 2))
            with pytest.raises(TransferError, match="ulimit -n"):
                receive(far)
            os.close(os.dup(0))  # the one that fitted was closed again

    in_child(receive_with_few_left)


def test_a_frame_half_received_gives_its_descriptors_back(pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        send_raw(near, frame(HELLO, fd_count=2)[:-1], pipe_fds)
        with pytest.raises(BlockingIOError):
            receive(far)


# The peer goes away


@pytest.mark.parametrize("length", range(len(frame(PING))))
def test_end_of_file_is_clean_only_between_frames(length: int, pipe_fds: list[int]) -> None:
    with socket_pair() as (near, far):
        if length:
            send_raw(near, frame(PING, fd_count=2)[:length], pipe_fds)
        near.close()
        with pytest.raises(PeerClosed) as raised:
            receive(far)
        assert raised.value.mid_frame == (length > 0)


def test_what_was_sent_before_the_end_is_received() -> None:
    with socket_pair() as (near, far):
        near.sendall(frame(PING))
        near.close()
        far.setblocking(False)
        receiver = FrameReceiver(CLIENT_TO_DAEMON)
        while (received := receiver.step(far)) is None:
            pass
        assert received.message == PING
        with pytest.raises(PeerClosed):
            receiver.step(far)


def test_a_peer_that_dies_with_unread_data_is_a_peer_that_closed() -> None:
    """The kernel says ECONNRESET then: a daemon killed while our request waits. What it said before is read first."""
    with socket_pair() as (near, far):
        far.sendall(frame(PING))
        near.sendall(frame(PING))
        near.close()
        far.setblocking(False)
        receiver = FrameReceiver(CLIENT_TO_DAEMON)
        while receiver.step(far) is None:
            pass
        with pytest.raises(PeerClosed) as raised:
            receiver.step(far)
        assert isinstance(raised.value.__cause__, ConnectionResetError)


def test_sending_to_a_peer_that_is_gone_says_so_and_raises_no_signal() -> None:
    with socket_pair() as (near, far):
        far.close()
        with pytest.raises(PeerClosed):
            FrameSender(frame(PING)).step(near)


# Anything at all


@given(st.binary(max_size=200))
def test_random_bytes_make_an_error_or_wait_for_more(data: bytes) -> None:
    with socket_pair() as (near, far):
        near.sendall(data)
        near.close()
        with pytest.raises((ContractError, PeerClosed)):
            receive(far)


@given(st.binary(max_size=100))
def test_random_bodies_are_refused(body: bytes) -> None:
    data = frame(HELLO, body=body)
    with pytest.raises(ProtocolError):
        decode_body(CLIENT_TO_DAEMON, decode_header(CLIENT_TO_DAEMON, data[: HEADER.size]), body)


GRANT_LIKE = Loading(stage="reading", bytes_done=1, bytes_total=2, bytes_per_s=0.5)


@settings(max_examples=400)
@given(st.integers(0, len(encode_frame(DAEMON_TO_CLIENT, GRANT_LIKE)) - 1), st.integers(1, 255))
def test_a_damaged_byte_makes_another_message_or_an_error(position: int, mask: int) -> None:
    data = bytearray(encode_frame(DAEMON_TO_CLIENT, GRANT_LIKE))
    data[position] ^= mask
    with socket_pair() as (near, far):
        near.sendall(data)
        near.close()
        with pytest.raises((ContractError, PeerClosed)):
            receive(far, DAEMON_TO_CLIENT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=10), JSON, max_size=5), st.lists(st.integers(1, 400), max_size=8))
def test_any_config_arrives_whole_however_it_is_cut(config, cuts: list[int]) -> None:
    message = HELLO.model_copy(update={"config": config})
    data = encode_frame(CLIENT_TO_DAEMON, message)
    with socket_pair() as (near, far):
        far.setblocking(False)
        receiver, received = FrameReceiver(CLIENT_TO_DAEMON), None
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
            near.sendall(data[start:end])
            while received is None:
                try:
                    received = receiver.step(far)
                except BlockingIOError:
                    break
        assert received is not None
        assert received.message == message
