"""The socket that tells events, with real listeners: what things are like comes first, nothing is missed in between,
and whoever reads too slowly sees it.
"""

import asyncio
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.support.eventually import eventually
from tests.support.renumbering import free_again
from tests.support.resources import open_fds
from weightcached.client.control.listening import Heard, Listener, Lost, follow
from weightcached.daemon.claim import Claim
from weightcached.daemon.control import event_socket
from weightcached.daemon.control.door import connection_of
from weightcached.daemon.control.event_socket import QUEUED_MAX, EventSocket
from weightcached.protocol.control import EVENTS_TOPIC, SUBSCRIPTIONS_MAX, ControlEvent
from weightcached.protocol.control_sockets import endpoint, has_message, readable
from weightcached.protocol.errors import DaemonAbsent, DaemonUnreachable
from weightcached.protocol.fds import OwnedFds

NONCE = secrets.token_hex(16)


class Happening:
    """Numbered events, told at once; the snapshot has the last one's number."""

    def __init__(self, claim: Claim) -> None:
        self.place = claim.place
        self.sequence = 0
        self.snapshots = 0
        self._context = zmq.Context()
        try:
            self._socket = EventSocket(
                self._context, claim=claim, path=claim.place.events_path, snapshot=self._snapshot
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _event(self, kind: str, message: str = "") -> ControlEvent:
        return ControlEvent.model_validate(
            {
                "kind": kind,
                "nonce": NONCE,
                "sequence": self.sequence,
                "place": str(self.place),
                "time_s": 1.0,
                "state": "ready",
                "message": message,
            }
        )

    def _snapshot(self) -> ControlEvent:
        self.snapshots += 1
        return self._event("snapshot")

    @property
    def has_listeners(self) -> bool:
        return self._socket.has_listeners

    def happen(self, message: str = "") -> None:
        self.sequence += 1
        self._socket.tell(self._event("state", message))

    def close(self) -> None:
        self._socket.close()
        self._context.destroy(linger=0)


@asynccontextmanager
async def happening(claim: Claim) -> AsyncIterator[Happening]:
    now = Happening(claim)
    try:
        yield now
    finally:
        now.close()


async def heard(listener: Listener) -> Heard:
    one = await listener.hear(20)
    assert one is not None
    return one


def test_who_comes_late_is_told_first_what_things_are_like(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with happening(claim) as now:
            for _ in range(5):
                now.happen()
            async with Listener(now.place) as listener:
                first = await heard(listener)
                assert (first.event.kind, first.event.sequence, first.missed) == ("snapshot", 5, 0)
                now.happen()
                second = await heard(listener)
                assert (second.event.kind, second.event.sequence, second.missed) == ("state", 6, 0)

    on_loop(look())


def test_nothing_is_missed_while_one_begins_to_listen(claim: Claim, on_loop) -> None:
    """Events never stop meanwhile: the first after the snapshot is the next in the sequence."""

    async def look() -> None:
        async with happening(claim) as now:

            async def go_on() -> None:
                while True:
                    now.happen()
                    await asyncio.sleep(0)

            going = asyncio.create_task(go_on())
            for _ in range(10):
                async with Listener(now.place) as listener:
                    numbers = [(await heard(listener)).event.sequence for _ in range(20)]
                    assert numbers == list(range(numbers[0], numbers[0] + 20))
            going.cancel()

    on_loop(look())


def test_who_comes_with_the_number_of_one_that_left_is_not_taken_for_it(
    claim: Claim, on_loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection's number is a descriptor, which the next one gets again: here between a look and a receipt.
    Tried again where another thread of ZeroMQ's has just given a lower one back, which it gets then.
    """
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

    monkeypatch.setattr(event_socket, "connection_of", remembered)
    monkeypatch.setattr(event_socket, "has_message", looked)

    async def look() -> None:
        async with happening(claim) as now:
            with zmq.Context() as context, context.socket(zmq.SUB) as first, context.socket(zmq.SUB) as second:
                first.connect(endpoint(now.place.events_path))
                first.subscribe(EVENTS_TOPIC)
                await asyncio.to_thread(eventually, lambda: now.has_listeners)

                def swap() -> None:
                    first.close(0)
                    fillers.extend(free_again(numbers[-1]).take_all())
                    second.subscribe(EVENTS_TOPIC)
                    second.connect(endpoint(now.place.events_path))

                meanwhile.append(swap)
                now.happen()  # has the daemon look
                await asyncio.to_thread(eventually, lambda: len(numbers) > 1)
                now.happen()
                await readable((second,), 20)
                assert now.has_listeners

    for _ in range(5):
        numbers.clear()
        with fillers:
            on_loop(look())
        if numbers.count(numbers[0]) == 2:
            return
    pytest.fail(f"nothing was shown: the last numbers were {numbers}")


def test_a_snapshot_is_for_the_one_who_asked(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with happening(claim) as now, Listener(now.place) as one:
            await heard(one)
            async with Listener(now.place) as another:
                await heard(another)
            now.happen()
            assert (await heard(one)).event.kind == "state"
            assert now.snapshots == 2

    on_loop(look())


def test_who_reads_too_slowly_misses_events_and_sees_it_and_is_told_anew(claim: Claim, on_loop) -> None:
    """And the daemon neither waits for it nor keeps more than so many for it; others miss nothing."""
    many = 10 * QUEUED_MAX

    async def look() -> None:
        async with happening(claim) as now, Listener(now.place) as slow, Listener(now.place) as quick:
            await heard(slow)
            await heard(quick)
            for number in range(1, many + 1):
                now.happen("x" * 1000)
                one = await heard(quick)
                assert (one.event.sequence, one.missed) == (number, 0)
            seen = [await heard(slow)]
            while (kept := await slow.hear(0.5)) is not None:  # what was kept for it
                seen.append(kept)
            now.happen()
            after = await heard(slow)
            assert after.missed > 0
            assert after.missed + len(seen) + 1 == after.event.sequence == many + 1
            assert (await heard(slow)).event.kind == "snapshot"
            now.happen()
            assert (await heard(slow)).missed == 0

    on_loop(look())


def test_a_listener_of_a_daemon_that_goes_is_told(claim: Claim, on_loop) -> None:
    async def look() -> None:
        now = Happening(claim)
        async with Listener(now.place) as listener:
            await heard(listener)
            now.close()
            with pytest.raises(DaemonUnreachable):
                await listener.hear(20)

    on_loop(look())


def test_following_goes_on_with_the_next_daemon_from_a_new_snapshot(claim: Claim, on_loop) -> None:
    async def look() -> None:
        now = Happening(claim)
        following = follow(now.place)
        one = await anext(following)
        assert isinstance(one, Heard)
        assert one.event.kind == "snapshot"
        now.close()
        lost = await anext(following)
        assert isinstance(lost, Lost)
        assert isinstance(lost.reason, DaemonUnreachable)
        next_one = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0.3)
        assert not next_one.done()  # said once, however often it is looked for
        claim.unlink_beside()
        async with happening(claim):
            again = await next_one
            assert isinstance(again, Heard)
            assert again.event.kind == "snapshot"
            await following.aclose()

    on_loop(look())


def test_following_a_place_without_a_daemon_ends_where_told(claim: Claim, on_loop) -> None:
    claim.unlink()

    async def look() -> None:
        found = [one async for one in follow(claim.place, until_gone=True)]
        assert [type(one.reason) for one in found if isinstance(one, Lost)] == [DaemonAbsent]

    on_loop(look())


def test_the_file_is_for_the_owner_only(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with happening(claim) as now:
            found = os.lstat(now.place.events_path)
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600

    on_loop(look())


@pytest.mark.parametrize(
    "messages",
    [
        [[b"\x01everything"]],
        [[b"\x01s" + b"0" * 31]],
        [[b"\x01s" + b"g" * 32]],
        [[b"\x01" + b"x" * 5000]],
        [[b"\x02e"]],
        [[b"hello"]],
        [[b"\x01e", b"more"]],
        [[b"\x01s" + b"%032x" % number] for number in range(SUBSCRIPTIONS_MAX + 1)],
    ],
    ids=["any", "short", "not hexadecimal", "large", "no subscription", "words", "parts", "many"],
)
def test_what_is_no_subscription_ends_its_connection_alone(claim: Claim, on_loop, messages: list[list[bytes]]) -> None:
    async def look() -> None:
        context = zmq.Context()
        async with happening(claim) as now, Listener(now.place) as other:
            await heard(other)
            bad = context.socket(zmq.XSUB)  # which can send anything
            watching = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            bad.connect(endpoint(now.place.events_path))
            for parts in messages:
                bad.send_multipart(parts)
            await readable((watching,), 20)
            assert watching.poll(0)
            now.happen()
            assert (await heard(other)).event.kind == "state"
            bad.disable_monitor()
            watching.close(0)
            context.destroy(linger=0)

    on_loop(look())


def test_who_sends_and_never_reads_delays_nobody(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with happening(claim) as now, Listener(now.place) as other:
            await heard(other)
            hostile = []
            for _ in range(20):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(str(now.place.events_path))
                connection.setblocking(False)
                connection.send(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
                hostile.append(connection)
            for number in range(500):
                now.happen("x" * 1000)
                assert (await heard(other)).event.sequence == number + 1
            for connection in hostile:
                connection.close()

    on_loop(look())


def test_nothing_is_left(claim: Claim, on_loop) -> None:
    async def look() -> None:
        async with happening(claim) as now:
            for _ in range(5):
                async with Listener(now.place) as listener:
                    await heard(listener)
        claim.unlink_beside()

    on_loop(look())
    before = len(open_fds())
    on_loop(look())
    assert len(open_fds()) <= before
