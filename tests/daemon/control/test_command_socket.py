"""The socket that takes commands, on the daemon's kind of loop with real askers: many and slow ones side by side, and
hostile peers whom nobody else notices.
"""

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.renumbering import free_again
from tests.support.resources import open_fds
from weightcached.daemon.claim import Claim
from weightcached.daemon.control import command_socket
from weightcached.daemon.control.command_socket import (
    UNDER_WAY_EACH_MAX,
    UNDER_WAY_MAX,
    WAITING_MAX,
    CommandSocket,
    Handler,
)
from weightcached.daemon.control.door import CONNECTIONS_MAX, connection_of
from weightcached.protocol.control import (
    CONTROL_ANSWERS,
    CONTROL_REQUESTS,
    AwaitChange,
    Decided,
    ReadDecision,
)
from weightcached.protocol.control_channel import ask
from weightcached.protocol.control_sockets import endpoint, has_message, readable
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import InternalError, PlaceTaken, ProtocolError, UpdateConflict, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import decode_frame, encode_frame
from weightcached.protocol.messages import Message, Refused
from weightcached.protocol.places import Place
from weightcached.protocol.testing import frame_lies
from weightcached.protocol.transaction import Outcome

FIRST = ReadDecision(transaction="1" * 32)
FRAME = encode_frame(CONTROL_REQUESTS, FIRST)
HOUR = AwaitChange(transaction="2" * 32, timeout_s=3600)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


async def decided(request: Message) -> Message:
    """Answers at once, but waits for ever where it is asked to wait."""
    if isinstance(request, AwaitChange):
        await asyncio.sleep(request.timeout_s)
    assert isinstance(request, ReadDecision)
    return Decided(transaction=request.transaction, outcome=Outcome.OPEN, vault_id="3" * 32)


@asynccontextmanager
async def served(claim: Claim, handle: Handler = decided) -> AsyncIterator[Place]:
    context = zmq.Context()
    try:
        commands = CommandSocket(context, claim=claim, path=claim.place.control_path, handle=handle)
        try:
            yield claim.place
        finally:
            await commands.close()
    finally:
        context.destroy(linger=0)


async def ask_first(place: Place, *, timeout_s: float = 20.0) -> Decided:
    return await ask(place, FIRST, Decided, deadline=Deadline.after(timeout_s))


@contextlib.contextmanager
def dealer(place: Place):
    context = zmq.Context()
    one = context.socket(zmq.DEALER)
    try:
        one.connect(endpoint(place.control_path))
        yield one
    finally:
        context.destroy(linger=0)


async def received(one: zmq.Socket, *, timeout_s: float = 20.0) -> list[bytes]:
    await readable((one,), timeout_s)
    return one.recv_multipart(zmq.NOBLOCK)


def raw(place: Place) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(place.control_path))
    connection.setblocking(False)
    return connection


async def gone(connection: socket.socket, *, timeout_s: float = 20.0) -> None:
    """Until the other side has ended it, whatever it says before."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(connection, 4096):
                pass


def test_the_file_is_for_the_owner_only_and_no_other_name_is_left(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with served(claim) as place:
            found = os.lstat(place.control_path)
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600
            assert {path.name for path in place.directory.iterdir()} == {
                place.socket_path.name,
                place.lock_path.name,
                place.control_path.name,
            }
        claim.unlink_beside()
        assert not claim.place.control_path.exists()

    on_loop(look())


def test_what_a_killed_daemon_left_is_replaced(claim: Claim, on_loop) -> None:
    place = claim.place
    for path in (place.control_path, place.control_path.with_name(place.control_path.name + ".new")):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))

    async def look() -> None:
        async with served(claim):
            assert (await ask_first(place)).outcome == "open"

    on_loop(look())


def test_a_live_socket_is_not_taken_from_whoever_listens_there(claim: Claim, on_loop) -> None:
    """ZeroMQ itself would: its bind removes what is there, and the first one hears nothing any more."""

    async def look() -> None:
        async with served(claim) as place:
            before = os.lstat(place.control_path)
            with pytest.raises(PlaceTaken):
                async with served(claim):
                    pass
            assert os.path.samestat(before, os.lstat(place.control_path))
            assert (await ask_first(place)).outcome == "open"

    on_loop(look())


def test_a_successors_file_is_left_alone(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with served(claim) as place:
            place.control_path.unlink()
            with socket.socket(socket.AF_UNIX) as successor:
                successor.bind(str(place.control_path))
                claim.unlink_beside()
                assert place.control_path.exists()

    on_loop(look())


def test_a_command_that_takes_an_hour_delays_nobody(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with served(claim) as place:
            slow = [asyncio.create_task(ask(place, HOUR, Decided, deadline=Deadline.after(60))) for _ in range(20)]
            answers = await asyncio.gather(*(ask_first(place) for _ in range(40)))
            assert {one.outcome for one in answers} == {"open"}
            assert not any(task.done() for task in slow)
            for task in slow:
                task.cancel()
            await asyncio.wait(slow)

    on_loop(look())


def test_a_thousand_commands_on_one_connection_are_all_answered(claim: Claim, on_loop) -> None:
    """More than wait anywhere: none is lost because an announcement came while another was answered."""

    async def look() -> None:
        async with served(claim) as place:
            with dealer(place) as one:
                for start in range(0, 1000, 10):
                    for number in range(start, start + 10):
                        one.send_multipart([number.to_bytes(8, "big"), FRAME])
                    got = {int.from_bytes((await received(one))[0], "big") for _ in range(10)}
                    assert got == set(range(start, start + 10))

    on_loop(look())


def test_errors_of_the_handler_are_the_askers(claim: Claim, on_loop) -> None:
    async def fails(request: Message) -> Message:
        assert isinstance(request, ReadDecision)
        if request == FIRST:
            raise UpdateConflict("another change is under way", found="it")
        raise ZeroDivisionError("ours")

    async def look() -> None:
        async with served(claim, fails) as place:
            with pytest.raises(UpdateConflict, match="found: it"):
                await ask_first(place)
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await ask(place, ReadDecision(transaction="9" * 32), Decided, deadline=Deadline.after(20))

    on_loop(look())


def test_an_answer_too_large_is_an_error_and_not_silence(claim: Claim, on_loop) -> None:
    async def verbose(request: Message) -> Message:
        return Refused(code="x", message="m").model_copy(update={"message": "x" * 2_000_000})

    async def look() -> None:
        async with served(claim, verbose) as place:
            with pytest.raises(ProtocolError, match="too large"):
                await ask_first(place)

    on_loop(look())


def test_one_connection_may_have_so_many_under_way(claim: Claim, on_loop) -> None:
    wait = encode_frame(CONTROL_REQUESTS, HOUR)

    async def look() -> None:
        async with served(claim) as place:
            with dealer(place) as greedy:
                for number in range(UNDER_WAY_EACH_MAX + 1):
                    greedy.send_multipart([number.to_bytes(8, "big"), wait])
                request_id, frame = await received(greedy)
                assert int.from_bytes(request_id, "big") == UNDER_WAY_EACH_MAX
                refused = decode_frame(CONTROL_ANSWERS, frame)
                assert isinstance(refused, Refused)
                assert refused.code == "daemon_not_ready"
                assert (await ask_first(place)).outcome == "open"  # the others' share is not touched

    on_loop(look())


def test_however_many_wait_others_are_answered(claim: Claim, on_loop) -> None:
    """Or those who wait for a decision would keep out whoever decides."""
    wait = encode_frame(CONTROL_REQUESTS, HOUR)

    async def look() -> None:
        async with served(claim) as place:
            with contextlib.ExitStack() as all_of_them:
                waiting = [all_of_them.enter_context(dealer(place)) for _ in range(UNDER_WAY_MAX // UNDER_WAY_EACH_MAX)]
                for one in waiting:
                    for number in range(UNDER_WAY_EACH_MAX):
                        one.send_multipart([number.to_bytes(8, "big"), wait])
                refused = 0
                while refused < UNDER_WAY_MAX - WAITING_MAX:
                    await readable(waiting, 20)
                    ready = [one for one in waiting if one.poll(0)]
                    assert ready, refused
                    for one in ready:
                        answer = decode_frame(CONTROL_ANSWERS, (await received(one))[1])
                        assert isinstance(answer, Refused)
                        assert answer.code == "daemon_not_ready"
                        refused += 1
                assert (await ask_first(place)).outcome == "open"

    on_loop(look())


def test_waiting_ends_with_the_connection(claim: Claim, on_loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever asks again and again, and leaves each time, would have it full for an hour."""
    monkeypatch.setattr(command_socket, "UNDER_WAY_MAX", 8)
    ended = 0

    async def waits(request: Message) -> Message:
        nonlocal ended
        try:
            return await decided(request)
        finally:
            ended += isinstance(request, AwaitChange)

    async def look() -> None:
        async with served(claim, waits) as place:
            for _ in range(3):
                left = [
                    asyncio.create_task(ask(place, HOUR, Decided, deadline=Deadline.after(60), patience_s=30))
                    for _ in range(6)
                ]
                await ask_first(place)
                await asyncio.sleep(0)
                for task in left:
                    task.cancel()
                await asyncio.wait(left)
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(WeightCacheError):
                        await ask_first(place)
                        break
        assert ended >= 6

    on_loop(look())


def test_who_comes_with_the_number_of_one_that_left_is_not_taken_for_it(
    claim: Claim, on_loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection's number is a descriptor, which the next one gets again: here between a look and a receipt."""
    swapped, decide = asyncio.Event(), asyncio.Event()
    numbers: list[int] = []
    meanwhile: list[Callable[[], None]] = []
    fillers = OwnedFds()

    def remembered(part: zmq.Frame) -> int:
        numbers.append(connection_of(part))
        return numbers[-1]

    def looked(of: zmq.Socket) -> bool:
        while meanwhile:
            meanwhile.pop()()
            assert of.poll(20_000)
        return has_message(of)

    async def later(request: Message) -> Message:
        if isinstance(request, AwaitChange):
            await decide.wait()
        return Decided(transaction=FIRST.transaction, outcome=Outcome.OPEN, vault_id="3" * 32)

    monkeypatch.setattr(command_socket, "connection_of", remembered)
    monkeypatch.setattr(command_socket, "has_message", looked)

    async def look() -> None:
        async with served(claim, later) as place:
            with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
                first.connect(endpoint(place.control_path))
                first.send_multipart([b"12345678", FRAME])
                await received(first)

                def swap() -> None:
                    first.close(0)
                    fillers.extend(free_again(numbers[-1]).take_all())
                    second.connect(endpoint(place.control_path))
                    second.send_multipart([b"87654321", encode_frame(CONTROL_REQUESTS, HOUR)])
                    swapped.set()

                meanwhile.append(swap)
                with raw(place):  # has the daemon look
                    await swapped.wait()
                    await ask_first(place)
                    decide.set()
                    number, _ = await received(second)
                assert number == b"87654321"

    with fillers:
        on_loop(look())
    assert numbers[0] == numbers[1], "or nothing was shown"


BROKEN = [
    [b""],
    [b"12345678"],
    [b"12345678", FRAME, b"more"],
    [b"short", FRAME],
    [b"x" * 200, FRAME],
    [b"12345678"] * 3000,
]


@pytest.mark.parametrize("parts", BROKEN, ids=lambda parts: f"{len(parts)}x{len(parts[0])}")
def test_what_is_no_command_ends_its_connection_alone(claim: Claim, on_loop, parts: list[bytes]) -> None:
    async def look() -> None:
        async with served(claim) as place:
            with dealer(place) as bad:
                watching = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                bad.send_multipart(parts)
                await readable((watching,), 20)
                assert watching.poll(0)
                bad.disable_monitor()
                watching.close(0)
            assert (await ask_first(place)).outcome == "open"

    on_loop(look())


@pytest.mark.parametrize("frame", [b"", b"HTTP/1.1", FRAME[:-1], FRAME + b"x", b"\0" * 64, bytes(60_000)])
def test_a_broken_frame_is_refused_and_the_connection_goes_on(claim: Claim, on_loop, frame: bytes) -> None:
    on_loop(refused_and_goes_on(claim, frame))


def test_a_lying_frame_is_refused_and_the_connection_goes_on(claim: Claim, on_loop, tmp_path: Path) -> None:
    lies = frame_lies(FIRST, pickle_target=str(tmp_path / "pickled"))
    on_loop(refused_and_goes_on(claim, *lies.values()))
    assert not (tmp_path / "pickled").exists()


async def refused_and_goes_on(claim: Claim, *frames: bytes) -> None:
    async with served(claim) as place:
        with dealer(place) as one:
            for frame in frames:
                one.send_multipart([b"12345678", frame])
                number, answer = await received(one)
                refused = decode_frame(CONTROL_ANSWERS, answer)
                assert (number, getattr(refused, "code", None)) == (b"12345678", "protocol"), frame
            one.send_multipart([b"87654321", FRAME])
            number, answer = await received(one)
            assert (number, type(decode_frame(CONTROL_ANSWERS, answer))) == (b"87654321", Decided)


GREETED = bytes([4, len(READY)]) + READY + b"\x01\x0812345678"
"""And a command's number, behind which its frame comes."""
WORDS = {
    "http": (b"\xffGET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10, b""),
    "broken handshake": (GREETING, b"\x04\xff"),
    "terabyte": (GREETING, GREETED + b"\x02" + (2**40).to_bytes(8, "big")),  # a part of that size
    "too large": (GREETING, GREETED + b"\x02" + (100_000).to_bytes(8, "big") + bytes(100_000)),
    "a command": (GREETING, GREETED + bytes([0, len(FRAME)]) + FRAME),
}


@pytest.mark.parametrize("what", WORDS)
def test_garbage_ends_its_connection_alone(claim: Claim, on_loop, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is none, said in the same way, is answered. (What comes all at once, ZeroMQ takes from nobody.)"""
    monkeypatch.setattr("weightcached.daemon.control.door.HANDSHAKE_MAX_S", 1.0)
    greeting, words = WORDS[what]

    async def look() -> None:
        loop = asyncio.get_running_loop()
        async with served(claim) as place:
            with raw(place) as bad:
                await loop.sock_sendall(bad, greeting)
                if words:
                    answered = b""
                    while len(answered) < len(GREETING):
                        answered += await loop.sock_recv(bad, len(GREETING) - len(answered))
                    with contextlib.suppress(ConnectionError):
                        await loop.sock_sendall(bad, words)
                if what == "a command":
                    async with asyncio.timeout(20):
                        while b"12345678" not in answered:
                            answered += await loop.sock_recv(bad, 4096)
                    return
                await gone(bad)
            assert (await ask_first(place)).outcome == "open"

    on_loop(look())


def test_who_says_nothing_is_let_go(claim: Claim, on_loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcached.daemon.control.door.HANDSHAKE_MAX_S", 0.3)

    async def look() -> None:
        async with served(claim) as place:
            with raw(place) as silent:
                await gone(silent)

    on_loop(look())


async def fds_at_most(count: int) -> None:
    deadline = Deadline.after(20)
    while len(open_fds()) > count:
        assert not deadline.passed, open_fds()
        await asyncio.sleep(0.01)


def test_thousands_of_connections_leave_descriptors_and_time_for_others(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with served(claim) as place:
            await ask_first(place)
            idle = len(open_fds()) + 8  # what the loop and ZeroMQ open when they first need it
            for _ in range(10):
                flood = [raw(place) for _ in range(200)]
                await fds_at_most(idle + len(flood) + CONNECTIONS_MAX)
                for one in flood:
                    one.close()
                begun_s = time.monotonic()
                assert (await ask_first(place)).outcome == "open"
                assert time.monotonic() - begun_s < 10
            await fds_at_most(idle)

    on_loop(look())


def test_nothing_is_left(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with served(claim) as place:
            await ask_first(place)

    on_loop(look())
    before = len(open_fds())
    for _ in range(10):
        on_loop(look())
    assert len(open_fds()) <= before
