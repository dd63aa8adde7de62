"""The asyncio edge, under asyncio and uvloop: nobody starves, closing wakes, a reused number gets no stale event."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from tests.support.resources import nothing_left_behind
from tests.support.wires import HELLO
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.errors import ProtocolError, TransferError
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Ping, Pong, Refused
from weightcached.protocol.testing import frame

PING, PONG = Ping(token=7), Pong(token=7)
LARGE = Refused(code="x", message="m" * 32_000, found="f" * 32_000, where="w" * 32_000, expected="e" * 32_000)
Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request) -> Iterator[Run]:
    """Runs a coroutine function on a loop of its own; at the end nothing of it is left."""

    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded())

    request.param().close()  # uvloop's first loop opens a pipe for the whole process
    with nothing_left_behind():
        yield run


class Pair:
    """The daemon's channel and the client's bare socket."""

    def __init__(self) -> None:
        self.client, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.daemon = AsyncChannel(far, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.daemon.close()
        self.client.close()


async def started(awaitable) -> asyncio.Task:
    """A task that has run until it waits."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    return task


def test_messages_go_both_ways(run: Run) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        client = AsyncChannel(near, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        daemon = AsyncChannel(far, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
        answer = await started(client.receive())
        await client.send(HELLO)
        assert (await daemon.receive()).message == HELLO
        reading, writing = os.pipe()
        await daemon.send(PONG, [reading, writing])
        frame = await answer
        assert frame.message == PONG
        assert os.fstat(frame.fds[1]).st_ino == os.fstat(writing).st_ino
        for fd in (*frame.fds.take_all(), reading, writing):
            os.close(fd)
        client.close()
        daemon.close()

    run(main)


def test_a_client_that_is_always_ready_does_not_starve_another(run: Run) -> None:
    """A read that never blocks never yields: without the pause after each frame the loop would see nobody else."""

    async def main() -> None:
        with Pair() as hog, Pair() as other:
            hog.client.sendall(frame(PING) * 500)
            taken = 0

            async def serve_hog() -> None:
                nonlocal taken
                while True:
                    await hog.daemon.receive()
                    taken += 1

            serving = await started(serve_hog())
            for _ in range(20):
                waiting = await started(other.daemon.receive())
                before = taken
                other.client.sendall(frame(PING))
                await waiting
                assert taken - before <= 5
            assert taken < 400
            serving.cancel()

    run(main)


def test_a_client_that_drips_costs_others_nothing(run: Run) -> None:
    async def main() -> None:
        with Pair() as slow, Pair() as other:
            waiting = await started(slow.daemon.receive())
            for byte in frame(PING):
                assert not waiting.done()
                slow.client.send(bytes([byte]))
                other.client.sendall(frame(HELLO))
                assert (await other.daemon.receive()).message == HELLO
            assert (await waiting).message == PING

    run(main)


def test_closing_wakes_who_receives_and_who_sends(run: Run) -> None:
    async def main() -> None:
        with Pair() as pair:
            receiving = await started(pair.daemon.receive())
            sending = await started(send_until_full(pair.daemon))
            pair.daemon.close()
            for task in (receiving, sending):
                with pytest.raises(ConnectionError, match="closed here"):
                    await task
            pair.daemon.close()
            with pytest.raises(ConnectionError, match="closed here"):
                await pair.daemon.receive()

    run(main)


async def send_until_full(channel: AsyncChannel) -> None:
    while True:
        await channel.send(LARGE)


def test_closing_after_data_came_and_before_the_task_ran(run: Run) -> None:
    """Both callbacks belong to one round of the loop; the task runs in the next, on a connection that is gone."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with Pair() as pair, pair.daemon.connection.dup() as twin:
            receiving = await started(pair.daemon.receive())
            loop.add_reader(twin, pair.daemon.close)
            pair.client.sendall(frame(PING))
            with pytest.raises(ConnectionError, match="closed here"):
                await receiving
            loop.remove_reader(twin)

    run(main)


def test_a_reused_number_gets_no_stale_event(run: Run) -> None:
    """uvloop keeps calling back for a number that was closed under it, and then for whoever has the number next."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first = Pair()
        number = first.daemon.connection.fileno()
        receiving = await started(first.daemon.receive())
        sending = await started(send_until_full(first.daemon))
        first.client.sendall(frame(PING)[:10])
        first.daemon.close()
        second_near, second_far = reuse(number)
        hit = asyncio.Event()
        loop.add_reader(number, hit.set)  # before the first one's tasks clean up
        for task in (receiving, sending):
            with pytest.raises(ConnectionError):
                await task
        first.client.close()
        for _ in range(3):  # rounds of the loop, which looks for events in each
            await asyncio.sleep(0)
        assert not hit.is_set()
        second_near.send(b"x")
        async with asyncio.timeout(20):  # else the first one's clean-up took the second one's reader away
            await hit.wait()
        loop.remove_reader(number)
        second_near.close()
        second_far.close()

    run(main)


def reuse(number: int) -> tuple[socket.socket, socket.socket]:
    """A socket pair whose second end has this number."""
    near, far = socket.socketpair()
    if near.fileno() == number:
        near, far = far, near
    if far.fileno() != number:
        os.dup2(far.fileno(), number, inheritable=False)
        far.close()
        far = socket.socket(fileno=number)
    return near, far


def test_a_channel_on_a_reused_number_works(run: Run) -> None:
    async def main() -> None:
        for _ in range(50):
            pair = Pair()
            receiving = await started(pair.daemon.receive())
            pair.daemon.close()
            pair.client.close()
            with Pair() as next_pair:
                next_receiving = await started(next_pair.daemon.receive())
                with pytest.raises(ConnectionError):
                    await receiving
                next_pair.client.sendall(frame(PING))
                assert (await next_receiving).message == PING

    run(main)


def test_a_cancelled_receive_keeps_what_has_arrived(run: Run) -> None:
    async def main() -> None:
        with Pair() as pair:
            pair.client.sendall(frame(HELLO)[:30])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pair.daemon.receive(), 0.02)
            pair.client.sendall(frame(HELLO)[30:])
            assert (await pair.daemon.receive()).message == HELLO

    run(main)


def test_a_frame_whose_receiver_is_cancelled_gives_its_descriptors_back(run: Run) -> None:
    """It is whole, but nobody gets it. The fixture counts."""

    async def main() -> None:
        near, far = socket.socketpair()
        client = AsyncChannel(near, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        with far:
            reading, writing = os.pipe()
            socket.send_fds(far, [frame(PONG, fd_count=2)], [reading, writing])
            receiving = await started(client.receive())
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            os.close(reading)
            os.close(writing)
        client.close()

    run(main)


def test_readable_takes_nothing(run: Run) -> None:
    async def main() -> None:
        with Pair() as pair:
            waiting = await started(pair.daemon.readable())
            assert not waiting.done()
            pair.client.sendall(frame(PING))
            await waiting
            assert (await pair.daemon.receive()).message == PING
            pair.client.close()
            await pair.daemon.readable()
            with pytest.raises(PeerClosed):
                await pair.daemon.receive()

    run(main)


def test_one_task_receives_while_another_sends(run: Run) -> None:
    async def main() -> None:
        with Pair() as pair:
            pair.client.setblocking(False)
            receiving = await started(pair.daemon.receive())
            sending = await started(pair.daemon.send(LARGE))
            more = await started(send_until_full(pair.daemon))
            await sending
            pair.client.sendall(frame(PING))
            assert (await receiving).message == PING
            assert not more.done()
            more.cancel()

    run(main)


@pytest.mark.parametrize(
    ("data", "fds", "error"),
    [
        (b"", [], PeerClosed),
        (frame(PING)[:10], [], PeerClosed),
        (frame(PING, body=b"\xc1"), [], ProtocolError),
        (frame(PING), [0], TransferError),
    ],
    ids=["closes", "cuts", "garbage", "descriptors"],
)
def test_errors_come_through_and_leave_nothing(run: Run, data: bytes, fds: list[int], error: type[Exception]) -> None:
    async def main() -> None:
        with Pair() as pair:
            receiving = await started(pair.daemon.receive())
            if data:
                socket.send_fds(pair.client, [data], fds)
            pair.client.close()
            with pytest.raises(error):
                await receiving
            with pytest.raises(PeerClosed):
                await send_until_full(pair.daemon)

    run(main)
