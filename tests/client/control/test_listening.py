"""Listeners that are lied to: what is no event of their place is an error that says where, whoever listens and however.

The socket is a real one that follows a script; how a real daemon tells is tested in `tests/daemon/control`.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.support.resources import open_fds
from weightcached.client.control import events_command, listening, watching
from weightcached.client.control.listening import Heard, Listener, Lost, follow
from weightcached.client.control.watching import watch
from weightcached.protocol.control import CONTROL_EVENTS, EVENTS_TOPIC, ControlEvent, Describe
from weightcached.protocol.control_sockets import frame_max
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable, ProtocolError
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place
from weightcached.protocol.testing import frame, frame_lies
from weightcached.protocol.testing.events import LyingEvents, Parts


@pytest.fixture
def place(runtime_dir: Path) -> Place:
    place = Place(runtime_dir, "default", "host-tp0of1")
    place.directory.mkdir(parents=True)
    return place


def event(place: Place, kind: str, sequence: int, **fields: object) -> ControlEvent:
    known = {"nonce": "1" * 32, "place": str(place), "time_s": 1.0, "state": "ready"}
    return ControlEvent.model_validate({**known, "kind": kind, "sequence": sequence, **fields})


def oversized(topic: bytes) -> list[bytes]:
    return [topic, bytes(frame_max(CONTROL_EVENTS) + 1)]


def lies(place: Place, pickle_target: Path) -> dict[str, bytes | ControlEvent | Parts]:
    """What is wrong → what may be told instead of an event of ``place``."""
    true = event(place, "state", 2)
    data = encode_frame(CONTROL_EVENTS, true)
    return {
        **frame_lies(true, pickle_target=str(pickle_target)),
        "nothing": b"",
        "cut short": data[:-1],
        "cut within the header": data[:7],
        "more": data + b"x",
        "a question": frame(Describe()),
        "another place's": event(Place(place.runtime_dir, "default", "host-tp1of2"), "state", 2),
        "another name's": event(Place(place.runtime_dir, "other", place.device), "state", 2),
        "a topic alone": lambda topic: [topic],
        "the topic of all alone": lambda _: [EVENTS_TOPIC],
        "a frame too many": lambda topic: [topic, data, data],
    }


async def test_every_lie_ends_the_listening_with_where_and_what_next(place: Place, tmp_path: Path) -> None:
    """Told first, and told after what things are like; nothing of it runs, and nothing is left open."""
    target = tmp_path / "pickled"
    told = lies(place, target)
    snapshot = event(place, "snapshot", 1)
    scripts = [script for lie in told.values() for script in ([lie], [snapshot, lie])]
    before = len(open_fds())
    with LyingEvents(place.events_path, *scripts) as lying:
        for lie in told:
            for first in ([], [Heard(snapshot)]):
                async with Listener(place) as listener:
                    for one in first:
                        assert await listener.hear(20) == one
                    with pytest.raises(ProtocolError) as refused:
                        pytest.fail(f"{lie}: {await listener.hear(20)}")
                assert f" at {place.events_path}; " in str(refused.value), lie
                assert refused.value.next_step, lie
    assert len(lying.topics) == len(set(lying.topics)) == len(scripts)
    assert len(open_fds()) == before
    assert not target.exists()


async def test_what_is_true_is_heard_and_what_was_missed_is_asked_for(place: Place) -> None:
    first, second, later, again = (
        event(place, kind, n) for kind, n in (("snapshot", 1), ("state", 2), ("state", 5), ("snapshot", 5))
    )
    with LyingEvents(place.events_path, [first, second, later], [again]) as lying:
        async with Listener(place) as listener:
            heard = [await listener.hear(20) for _ in range(4)]
    assert heard == [Heard(first), Heard(second), Heard(later, missed=2), Heard(again)]
    assert len(set(lying.topics)) == 2


async def test_an_event_too_large_is_never_taken_and_whoever_follows_begins_anew(place: Place) -> None:
    """ZeroMQ ends the connection at its header."""
    snapshot = event(place, "snapshot", 1)
    with LyingEvents(place.events_path, [snapshot, oversized], [snapshot, oversized], [snapshot]):
        async with Listener(place) as listener:
            assert await listener.hear(20) == Heard(snapshot)
            with pytest.raises(DaemonUnreachable):
                pytest.fail(f"{await listener.hear(20)}")
        async with aclosing(follow(place)) as following:
            assert await anext(following) == Heard(snapshot)
            lost = await anext(following)
            assert isinstance(lost, Lost)
            assert isinstance(lost.reason, DaemonUnreachable)
            assert await anext(following) == Heard(snapshot)


async def test_whoever_says_nothing_is_not_waited_for_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PATIENCE_S", 0.2)
    snapshot = event(place, "snapshot", 1)
    with LyingEvents(place.events_path, [], [], [snapshot]):
        async with Listener(place) as listener:
            with pytest.raises(DaemonNotReady, match=f"where: {place.events_path}"):
                await listener.begin(0.2)
        async with aclosing(follow(place)) as following:
            lost = await anext(following)
            assert isinstance(lost, Lost)
            assert isinstance(lost.reason, DaemonNotReady)
            assert await anext(following) == Heard(snapshot)


async def test_watching_says_once_that_a_place_lies_and_hears_it_when_it_does_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 0.01)
    snapshot, lie = event(place, "snapshot", 1), b"HTTP/1.1 200 OK"
    with LyingEvents(place.events_path, [lie], [lie], [snapshot, lie]):
        async with aclosing(watch(lambda: [place], allowed=AllowList(), forever=True)) as said:
            found = [await anext(said) for _ in range(3)]
    assert [type(one) for one in found] == [Lost, Heard, Lost], found
    assert isinstance(found[0], Lost)
    assert isinstance(found[0].reason, ProtocolError)


def test_the_command_says_which_place_lies(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    other = Place(place.runtime_dir, "default", "host-tp1of2")
    snapshot = event(place, "snapshot", 1)
    place = Place(place.runtime_dir, "default", "host-tp0of2")
    with (
        LyingEvents(place.events_path, [event(place, "snapshot", 1)]),
        LyingEvents(other.events_path, [snapshot]),
    ):
        arguments = ["--runtime-dir", str(place.runtime_dir), "--tp-size", "2", "--json"]
        assert events_command.main(arguments) == events_command.UNTOLD_EXIT
    true, lied = map(json.loads, capsys.readouterr().out.splitlines())
    assert (true["kind"], true["place"]) == ("snapshot", str(place))
    assert (lied["kind"], lied["place"], lied["error"]["code"]) == ("lost", str(other), "protocol")
    assert lied["error"]["found"] == snapshot.place
