"""Asking on the control plane: every way in which there is no good answer, each with a real socket, and nothing left
behind. Both ways of waiting do the same.
"""

import asyncio
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq

from tests.support.forked import in_child
from tests.support.listeners import listening_as
from tests.support.resources import open_fds
from tests.support.unprivileged import NOBODY
from weightcached.protocol import control_channel
from weightcached.protocol.control import CONTROL_ANSWERS, Decided, Describe, ReadDecision
from weightcached.protocol.control_channel import ask, ask_blocking, look
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    InvalidPlace,
    ProtocolError,
    UntrustedClient,
    UntrustedDaemon,
    UpdateConflict,
    WeightCacheError,
)
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.messages import Message, Refused
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place
from weightcached.protocol.testing import frame, frame_lies
from weightcached.protocol.testing.commands import LyingCommands, Parts
from weightcached.protocol.transaction import Outcome

TRANSACTION = "1" * 32
QUESTION = ReadDecision(transaction=TRANSACTION)
ANSWER = Decided(transaction=TRANSACTION, outcome=Outcome.OPEN, vault_id="2" * 32)
GOOD = encode_frame(CONTROL_ANSWERS, ANSWER)

Asking = Callable[..., Message]


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        place = Place(Path(name), "default", "host-tp0of1")
        place.directory.mkdir()
        yield place


@pytest.fixture(params=["blocking", "on a loop"])
def asking(request: pytest.FixtureRequest, place: Place) -> Iterator[Asking]:
    """``asking(timeout_s=, patience_s=)``: QUESTION's answer at ``place``. In the end no descriptor is left."""

    def ask_it(*, timeout_s: float = 10.0, patience_s: float = 10.0, question: Message = QUESTION) -> Message:
        deadline = Deadline.after(timeout_s)
        if request.param == "blocking":
            return ask_blocking(place, question, Decided, deadline=deadline, patience_s=patience_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(ask(place, question, Decided, deadline=deadline, patience_s=patience_s))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # the first loop opens what all share
    before = len(open_fds())
    yield ask_it
    assert len(open_fds()) == before


def test_the_answer_to_a_question(place: Place, asking: Asking) -> None:
    with LyingCommands(place.control_path, ANSWER) as daemon:
        assert asking() == ANSWER
    assert daemon.heard == [QUESTION]


def test_a_refusal_is_raised_as_its_error(place: Place, asking: Asking) -> None:
    refused = Refused(code="update_conflict", message="no", found="another")
    with (
        LyingCommands(place.control_path, refused),
        pytest.raises(UpdateConflict, match="found: another"),
    ):
        asking()


@pytest.mark.parametrize(
    "answer",
    [
        lambda identity, number: [identity, number],
        lambda identity, number: [identity, number, GOOD, b""],
        lambda identity, number: [identity, b"another!", GOOD],
    ],
)
def test_what_is_no_answer_is_an_error(place: Place, asking: Asking, answer: Parts) -> None:
    with LyingCommands(place.control_path, answer), pytest.raises(ProtocolError):
        asking()


def test_a_lying_answer_is_an_error(place: Place, asking: Asking) -> None:
    target = place.directory / "pickled"
    lies = frame_lies(ANSWER, pickle_target=str(target))
    lies |= {"nothing": b"", "cut short": GOOD[:-1], "more": GOOD + b"x", "a question": frame(Describe())}
    with LyingCommands(place.control_path, *lies.values()) as daemon:
        for lie in lies:
            with pytest.raises(ProtocolError):
                pytest.fail(f"{lie}: {asking()}")
    assert daemon.heard == [QUESTION] * len(lies)
    assert not target.exists()


def test_an_answer_of_another_kind_is_an_error(place: Place) -> None:
    with (
        LyingCommands(place.control_path, ANSWER),
        pytest.raises(ProtocolError, match="Decided"),
    ):
        ask_blocking(place, Describe(), Refused, deadline=Deadline.after(10))


def test_an_answer_too_large_is_never_taken(place: Place, asking: Asking) -> None:
    """ZeroMQ ends the connection at its header; asked again, the daemon gives the good one."""
    huge = bytes(CONTROL_ANSWERS.body_max_bytes + 17)
    with LyingCommands(place.control_path, huge, ANSWER) as daemon:
        assert asking() == ANSWER
    assert daemon.heard == [QUESTION, QUESTION]


def test_nobody_answers_in_time(place: Place, asking: Asking) -> None:
    never = LyingCommands(place.control_path, lambda *_: [])
    with never, pytest.raises(DaemonNotReady, match="does not answer in time"):
        asking(timeout_s=0.3)


def test_without_time_nobody_is_asked_nor_blamed(place: Place, asking: Asking) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.bind(f"ipc://{place.control_path}")
        with pytest.raises(DaemonNotReady, match=r"no time left.*expected: .*found: 0 s.*next step: allow more time"):
            asking(timeout_s=0)
        assert not bound.poll(timeout=100)
    place.control_path.unlink()


def test_who_listens_and_never_says_anything_costs_no_more_than_the_deadline(place: Place, asking: Asking) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(place.control_path))
        mute.listen()
        begun_s = time.monotonic()
        with pytest.raises(DaemonNotReady):
            asking(timeout_s=0.3)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("missing", ["sockets", "directory", "runtime directory"])
def test_absent_is_said_at_once(place: Place, asking: Asking, missing: str) -> None:
    if missing != "sockets":
        place.directory.rmdir()
    if missing == "runtime directory":
        place.runtime_dir.rmdir()
    with pytest.raises(DaemonAbsent, match=str(place.socket_path)):
        asking(timeout_s=60, patience_s=60)
    place.directory.mkdir(parents=True, exist_ok=True)


def test_a_daemon_that_takes_no_commands_yet_is_waited_for(place: Place, asking: Asking) -> None:
    with socket.socket(socket.AF_UNIX) as data_plane:
        data_plane.bind(str(place.socket_path))
        data_plane.listen(1024)
        with pytest.raises(DaemonNotReady, match="takes no commands yet"):
            asking(patience_s=0.2)
        later = threading.Timer(0.2, lambda: entered.append(served.__enter__()))
        entered: list = []
        served = LyingCommands(place.control_path, ANSWER)
        later.start()
        assert asking() == ANSWER
        later.join()
        served.__exit__(None, None, None)


def test_nobody_listens_any_more(place: Place, asking: Asking) -> None:
    """The file is there, as a killed daemon leaves it: waited for as long as one may be, and no longer."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(place.control_path))
    with pytest.raises(DaemonUnreachable, match=r"nobody listens there.*\.ctl"):
        asking(timeout_s=60, patience_s=0.2)


def test_neither_socket_is_listened_at(place: Place, asking: Asking) -> None:
    """Weights are kept, and their daemon has stopped."""
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(place.socket_path))
    with pytest.raises(DaemonUnreachable, match=r"nobody listens there.*\.sock"):
        asking(timeout_s=60, patience_s=0.2)


def test_a_question_whose_daemon_goes_away_is_asked_of_the_next(place: Place, asking: Asking) -> None:
    answers: list[Message] = []
    asker = threading.Thread(target=lambda: answers.append(asking()))
    with LyingCommands(place.control_path, lambda *_: []) as first:
        asker.start()
    with LyingCommands(place.control_path, ANSWER) as second:
        asker.join(30)
    assert answers == [ANSWER]
    assert first.heard == second.heard == [QUESTION]


def test_a_daemon_that_dies_between_the_look_and_the_question_is_waited_for(
    place: Place, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ does not say of a connect whether it failed, and does not try again: only its monitor tells."""
    hidden = place.control_path.with_suffix(".hidden")
    looks: list[object] = []

    def look_and_lose(place: Place, path: Path, allowed: AllowList) -> object:
        if hidden.exists():
            hidden.rename(path)
        looks.append(look(place, path, allowed))
        if len(looks) <= 2:
            os.rename(path, hidden)
        return looks[-1]

    monkeypatch.setattr(control_channel, "look", look_and_lose)
    with LyingCommands(place.control_path, ANSWER) as daemon:
        assert asking() == ANSWER
    assert (daemon.heard, len(looks)) == ([QUESTION], 3)


def test_a_question_too_large_is_not_sent(place: Place, asking: Asking) -> None:
    with pytest.raises(ProtocolError, match="too large"):
        asking(question=Refused(code="x" * 1000, message="y" * 30000, found="z" * 32000, where="w" * 10000))


def test_something_else_than_a_socket(place: Place, asking: Asking) -> None:
    place.control_path.write_text("")
    with pytest.raises(InvalidPlace, match="not a socket"):
        asking()


def test_a_directory_that_others_can_write_is_not_looked_into(place: Place, asking: Asking) -> None:
    with LyingCommands(place.control_path):
        place.directory.chmod(0o777)
        with pytest.raises(UntrustedDaemon):
            asking()


@pytest.mark.root
def test_a_daemon_of_another_user_is_told_nothing(place: Place, asking: Asking) -> None:
    place.directory.chmod(0o777)
    with listening_as(NOBODY, place.control_path, from_step="listen") as received:
        place.directory.chmod(0o755)
        with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
            asking()
        assert received() == 0


@pytest.mark.root
def test_a_socket_of_another_user_is_not_connected_to(place: Place, asking: Asking) -> None:
    with LyingCommands(place.control_path):
        os.chown(place.control_path, NOBODY, NOBODY)
        with pytest.raises(UntrustedDaemon, match=f"uid {NOBODY}"):
            asking()


@pytest.mark.root
def test_who_may_not_enter_is_told_so(place: Place) -> None:
    """By the file's mode; and where that would let it in, by the daemon, which ends the connection."""

    def as_nobody() -> None:
        with pytest.raises(UntrustedClient):
            ask_blocking(place, QUESTION, Decided, deadline=Deadline.after(20))

    context = zmq.Context()
    bound = context.socket(zmq.ROUTER)
    bound.set(zmq.IPC_FILTER_UID, 0)
    bound.bind(f"ipc://{place.control_path}")
    for mode in (0o600, 0o666):
        place.control_path.chmod(mode)
        assert stat.S_IMODE(place.control_path.stat().st_mode) == mode
        in_child(as_nobody, uid=NOBODY)
    bound.close(0)
    context.term()


def test_many_at_once_on_one_loop(place: Place) -> None:
    async def many() -> list[Decided | WeightCacheError]:
        asked = [ask(place, QUESTION, Decided, deadline=Deadline.after(30)) for _ in range(20)]
        return await asyncio.gather(*asked)

    with (
        LyingCommands(place.control_path, *[ANSWER] * 20),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        assert runner.run(many()) == [ANSWER] * 20


def test_cancelled_nothing_is_left(place: Place) -> None:
    async def give_up() -> None:
        loop, taken = asyncio.get_running_loop(), asyncio.Event()

        def take(*_: bytes) -> list[bytes]:
            loop.call_soon_threadsafe(taken.set)
            return []

        with LyingCommands(place.control_path, take):
            before = len(open_fds())
            asked = asyncio.create_task(ask(place, QUESTION, Decided, deadline=Deadline.after(30)))
            await taken.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert len(open_fds()) <= before

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(give_up())
