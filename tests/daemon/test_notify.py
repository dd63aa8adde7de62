"""The notify protocol: what datagrams mean, and the keeper's side of it against a socket that a test reads."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kept_child import sealed
from tests.support.resources import nothing_left_behind
from weightcached.daemon.notify import Notifier
from weightcached.daemon.notify_protocol import (
    DATAGRAM_MAX_BYTES,
    NAME_MAX_LENGTH,
    BadDatagram,
    Notification,
    decode,
    encode,
    socket_address,
    usable_name,
    watchdog_interval_s,
)
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import InvalidEnvironment, ManagerUnreachable

# Words


@pytest.mark.parametrize(
    ("data", "descriptors", "meaning"),
    [
        (b"", 0, Notification()),
        (b"READY=1\nSTATUS=serving 3 engines\n", 0, Notification(ready=True, status="serving 3 engines")),
        (b"STOPPING=1", 0, Notification(stopping=True)),
        (b"WATCHDOG=1", 0, Notification(alive=True)),
        (b"WATCHDOG=trigger", 0, Notification(hung=True)),
        (b"ERRNO=28", 0, Notification(errno=28)),
        (b"STATUS=a=b", 0, Notification(status="a=b")),
        (b"MAINPID=1\nX_OTHER=\n=\nno value\nmonotonic", 0, Notification()),
        (b"FDSTORE=1\nFDNAME=state\nFDPOLL=0", 1, Notification(store=True, name="state")),
        (b"FDSTORE=1", 2, Notification(store=True, name="stored")),
        (b"FDSTORE=1\nFDNAME=a:b", 1, Notification(store=True, name="stored")),
        (b"FDSTOREREMOVE=1\nFDNAME=state", 0, Notification(remove=True, name="state")),
        (b"BARRIER=1", 1, Notification(barrier=True)),
        (b"X_WEIGHTCACHED_KEPT=1", 1, Notification(kept_query=True)),
    ],
)
def test_what_a_datagram_means(data: bytes, descriptors: int, meaning: Notification) -> None:
    assert decode(data, descriptors=descriptors) == meaning


@pytest.mark.parametrize(
    ("data", "descriptors", "reason"),
    [
        (b"READY=yes", 0, "READY is not 1"),
        (b"READY=1\nREADY=1", 0, "READY stands twice"),
        (b"WATCHDOG=0", 0, "WATCHDOG is neither 1 nor trigger"),
        (b"ERRNO=-1", 0, "ERRNO is no error number"),
        (b"ERRNO=4096", 0, "ERRNO is no error number"),
        ("ERRNO=²".encode(), 0, "ERRNO is no error number"),
        (b"STATUS=\xff", 0, "not UTF-8"),
        (b"STATUS=a\0", 0, "a NUL character"),
        (b"A=" + bytes(DATAGRAM_MAX_BYTES), 0, "over 4096 bytes"),
        (b"STATUS=x", 1, "1 descriptors with nothing to do"),
        (b"FDSTORE=1", 0, "FDSTORE without a descriptor"),
        (b"FDSTORE=1\nFDSTOREREMOVE=1\nFDNAME=a", 1, "to store and to remove at once"),
        (b"FDSTOREREMOVE=1", 0, "FDSTOREREMOVE without a name"),
        (b"BARRIER=1", 0, "BARRIER with 0 descriptors instead of one"),
        (b"BARRIER=1\nSTATUS=x", 1, "BARRIER does not stand alone"),
        (b"X_WEIGHTCACHED_KEPT=1", 2, "X_WEIGHTCACHED_KEPT with 2 descriptors instead of one"),
    ],
)
def test_what_is_refused(data: bytes, descriptors: int, reason: str) -> None:
    with pytest.raises(BadDatagram) as refused:
        decode(data, descriptors=descriptors)
    assert str(refused.value) == reason


_KEYS = st.sampled_from(["READY", "STATUS", "FDSTORE", "FDSTOREREMOVE", "FDNAME", "BARRIER", "WATCHDOG", "ERRNO", "X"])
_LINES = st.lists(st.tuples(_KEYS, st.one_of(st.just("1"), st.text(max_size=8))), max_size=5)


@given(
    st.one_of(
        st.binary(max_size=5000), _LINES.map(lambda lines: "\n".join(f"{k}={v}" for k, v in lines).encode("utf-8"))
    ),
    st.integers(0, 253),
)
def test_any_bytes_are_understood_or_refused(data: bytes, descriptors: int) -> None:
    try:
        meaning = decode(data, descriptors=descriptors)
    except BadDatagram:
        return
    assert meaning.store or meaning.barrier or meaning.kept_query or not descriptors
    assert usable_name(meaning.name) == meaning.name


@given(st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=500))
def test_a_status_arrives_as_it_was_sent(text: str) -> None:
    assert decode(encode({"STATUS": text}), descriptors=0).status == text


@pytest.mark.parametrize("value", ["a\nREADY=1", "a\0", "x" * DATAGRAM_MAX_BYTES, "\ud800"])
def test_what_cannot_be_sent(value: str) -> None:
    with pytest.raises(ValueError, match=r"end its line|bytes for a datagram|surrogates"):
        encode({"STATUS": value})


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("g0.s1", "g0.s1"),
        ("x" * NAME_MAX_LENGTH, "x" * NAME_MAX_LENGTH),
        ("x" * (NAME_MAX_LENGTH + 1), "stored"),
        *((bad, "stored") for bad in ("", "a:b", "ä", "a\n")),
    ],
)
def test_a_name_that_cannot_be_used_is_that_of_the_nameless(name: str, used: str) -> None:
    assert usable_name(name) == used


def test_addresses() -> None:
    assert socket_address("/run/systemd/notify") == "/run/systemd/notify"
    assert socket_address("@abstract") == "\0abstract"
    for text in ("", "/", "@", "relative", "vsock:2:3", "/a\0b", "/" + 107 * "x", "/" + 54 * "ä"):
        with pytest.raises(InvalidEnvironment):
            socket_address(text)


def test_the_watchdogs_interval() -> None:
    assert watchdog_interval_s({}, pid=5) is None
    assert watchdog_interval_s({"WATCHDOG_USEC": "2500000"}, pid=5) == 2.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "5"}, pid=5) == 2.5
    assert watchdog_interval_s({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "6"}, pid=5) is None
    for text in ("", "0", "-1", "1.5", "²", "9" * 400):
        with pytest.raises(InvalidEnvironment):
            watchdog_interval_s({"WATCHDOG_USEC": text}, pid=5)


# The keeper's side


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[socket.socket]:
    """A notify socket that nobody reads but the test; at its address in the test's folder."""
    runtime_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as bound:
        bound.bind(str(runtime_dir / "notify"))
        yield bound


def notifier_of(manager: socket.socket, **more: str) -> Notifier:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager.getsockname(), **more})
    assert notifier is not None
    return notifier


async def fill(notifier: Notifier) -> int:
    """Say as much as the queue takes."""
    count = 0
    while notifier.say_status(str(count)):
        count += 1
    assert count >= 1
    return count


def receive(manager: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(manager, 4096, 10)
    return data, fds


def test_what_the_manager_said_is_taken_out_of_the_environment(manager: socket.socket) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.getsockname(),
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "WEIGHTCACHED_SUPERVISOR": str(os.getppid()),
        "OTHER": "stays",
    }
    notifier = Notifier.from_environment(environment)
    assert notifier is not None
    notifier.close()
    assert environment == {"OTHER": "stays"}
    assert notifier.watchdog_s == 3.0
    assert notifier.supervised


def test_a_supervisor_that_is_not_our_parent_is_not_ours(manager: socket.socket) -> None:
    notifier = notifier_of(manager, WEIGHTCACHED_SUPERVISOR=str(os.getpid()))
    assert not notifier.supervised
    notifier.close()


def test_without_a_manager() -> None:
    assert Notifier.from_environment({"WATCHDOG_USEC": "1000"}) is None


@pytest.mark.parametrize("address", ["/nowhere/notify", "@weightcached-nobody-listens"])
def test_a_manager_that_is_not_there(address: str) -> None:
    with nothing_left_behind(), pytest.raises(ManagerUnreachable) as refused:
        Notifier.from_environment({"NOTIFY_SOCKET": address})
    assert refused.value.where == address


async def test_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # the kernel finds a name
        name = manager.getsockname()[1:].decode()
        notifier = Notifier.from_environment({"NOTIFY_SOCKET": f"@{name}"})
        assert notifier is not None
        await notifier.ready("serving")
        notifier.close()
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


async def test_what_is_sent(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    await notifier.ready("serving\nREADY=0\x1b")
    assert notifier.say_status("x" * 5000)
    await notifier.stopping("draining")
    fd = sealed("text")
    await notifier.store("state", fd)
    await notifier.remove("state")
    assert receive(manager)[0] == b"READY=1\nSTATUS=serving\\nREADY=0\\x1b"
    assert receive(manager)[0] == b"STATUS=" + 500 * b"x"
    assert receive(manager)[0] == b"STOPPING=1\nSTATUS=draining"
    data, (kept,) = receive(manager)
    assert data == b"FDSTORE=1\nFDNAME=state\nFDPOLL=0"
    assert os.fstat(kept).st_ino == os.fstat(fd).st_ino
    assert receive(manager) == (b"FDSTOREREMOVE=1\nFDNAME=state", [])
    os.close(kept)
    os.close(fd)
    with pytest.raises(ValueError, match="cannot be called"):
        await notifier.remove("a:b")
    notifier.close()


async def test_a_full_queue_is_waited_for_and_keeps_the_order(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    count = await fill(notifier)
    sending = [asyncio.create_task(notifier.send({"STATUS": f"late {number}"})) for number in range(30)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in sending)
    assert not notifier.say_status("not now")
    said: list[bytes] = []
    while len(said) < count + 30:
        try:
            said.append(receive(manager)[0])
        except BlockingIOError:
            await asyncio.sleep(0)
    await asyncio.gather(*sending)
    assert said[count:] == [f"STATUS=late {number}".encode() for number in range(30)]
    notifier.close()


async def test_a_queue_that_stays_full_is_an_error_at_the_deadline(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    await fill(notifier)
    with nothing_left_behind():
        for ask in (notifier.barrier, notifier.kept):
            with pytest.raises(ManagerUnreachable, match="does not read"):
                await ask(deadline=Deadline.after(0.05))
    receive(manager)
    await notifier.send({"STATUS": "well again"})
    notifier.close()


async def test_a_manager_that_goes_away(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    await fill(notifier)
    waiting = asyncio.create_task(notifier.send({"STATUS": "waits"}))
    await asyncio.sleep(0)
    manager.close()
    with pytest.raises(ManagerUnreachable, match="cannot be reached"):
        await waiting
    assert not notifier.say_status("to nobody")
    notifier.close()


async def test_a_barrier_ends_when_the_manager_closes_its_descriptor(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    with nothing_left_behind():
        waiting = asyncio.create_task(notifier.barrier())
        while True:
            try:
                data, (fd,) = receive(manager)
                break
            except BlockingIOError:
                await asyncio.sleep(0)
        assert data == b"BARRIER=1"
        await asyncio.sleep(0)
        assert not waiting.done()
        os.close(fd)
        await waiting
    with nothing_left_behind():
        with pytest.raises(ManagerUnreachable, match="does not answer"):
            await notifier.barrier(deadline=Deadline.after(0.05))
        os.close(receive(manager)[1][0])
    notifier.close()


@pytest.mark.parametrize(
    ("answer", "kept"),
    [(b"", ()), (b"state\ng0.s0\nstate\n", ("state", "g0.s0", "state")), (b"state\ng0.", ("state",))],
)
async def test_the_answer_what_is_kept_counts_as_far_as_it_is_whole(
    manager: socket.socket, answer: bytes, kept: tuple[str, ...]
) -> None:
    notifier = notifier_of(manager)
    waiting = asyncio.create_task(notifier.kept())
    while True:
        try:
            data, (fd,) = receive(manager)
            break
        except BlockingIOError:
            await asyncio.sleep(0)
    assert data == b"X_WEIGHTCACHED_KEPT=1"
    os.write(fd, answer)
    os.close(fd)
    assert await waiting == kept
    notifier.close()


async def test_signs_of_life_come_twice_in_each_interval(manager: socket.socket) -> None:
    notifier = notifier_of(manager, WATCHDOG_USEC="100000")
    living = asyncio.create_task(notifier.give_signs_of_life())
    arrived = asyncio.Queue[bytes]()
    asyncio.get_running_loop().add_reader(manager, lambda: arrived.put_nowait(receive(manager)[0]))
    began_s = asyncio.get_running_loop().time()
    for _ in range(4):
        assert await arrived.get() == b"WATCHDOG=1"
    assert asyncio.get_running_loop().time() - began_s >= 3 * 0.05 - 0.01
    asyncio.get_running_loop().remove_reader(manager)
    living.cancel()
    await asyncio.wait({living})
    notifier.close()


def test_signs_of_life_are_for_who_is_watched(manager: socket.socket) -> None:
    notifier = notifier_of(manager)
    with pytest.raises(ValueError, match="no signs of life"):
        asyncio.run(notifier.give_signs_of_life())
    notifier.close()


def test_the_words_alone_import_no_loop() -> None:
    """The supervisor reads them, and must stay small."""
    program = "import sys, weightcached.daemon.notify_protocol\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True).stdout
    assert "asyncio" not in loaded.split()
