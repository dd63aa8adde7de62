"""Losing the daemon and having the lease again: what is asked, which answers count, what is told to whom.

A lying daemon whose listener outlives each script, as one in a vault does; `test_restarts.py` has real ones.
"""

import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import in_child
from tests.support.reports import READY
from tests.support.resources import open_fds
from weightcached.client import WeightSet
from weightcached.client.backoff import FIRST_S, LONGEST_S, Backoff
from weightcached.client.lease import Lease
from weightcached.protocol.errors import DaemonNotReady, DaemonUnreachable, GenerationGone
from weightcached.protocol.messages import Event, Hello, Loading, Message, Pong, Refused, Resume, Status
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    AnswerPings,
    Close,
    Gate,
    HonestGrant,
    LyingDaemon,
    Open,
    Receive,
    ReceiveToEnd,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Stall,
    Step,
    Wire,
    frame,
)

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]
Lives = Callable[..., LyingDaemon]

LOADING = Loading(stage="adopt", bytes_done=0, bytes_total=0, bytes_per_s=0.0)
NONCE = "c" * 32
HOLD: list[Step] = [AnswerPings()]


def lease_of(weights: WeightSet) -> Lease:
    assert weights.lease is not None
    return weights.lease


class Told:
    """What a lease tells: the names of its callbacks with what they were called with, in order."""

    def __init__(self, lease: Lease) -> None:
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
        for name in ("lost", "resumed", "stale", "event"):
            getattr(lease, f"on_{name}")(lambda *words, name=name: self._calls.put((name, words)))

    def next(self, name: str) -> tuple[Any, ...]:
        """Wait for the next call, which must be this one."""
        found, words = self._calls.get(timeout=20)
        assert found == name, (found, words)
        return words

    @property
    def nothing_more(self) -> bool:
        return self._calls.empty()


def granted_again(grant: HonestGrant, **changes: Any) -> Send:
    """The answer to Resume: the same grant, from another run of the keeper, without descriptors."""
    return Send(grant.message.model_copy(update={"nonce": NONCE, **changes}))


@pytest.fixture
def die() -> Iterator[Gate]:
    """Ends the first life of a daemon that :func:`lives` makes."""
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture
def lives(place: Place, grant: HonestGrant, die: Gate) -> Lives:
    """``lives(*later, says=steps)``: a daemon that grants, says something when it is told to die, and dies; and then
    follows the later scripts.
    """

    def make(*later: list[Step], says: Sequence[Step] = ()) -> LyingDaemon:
        return LyingDaemon(place.socket_path, [Receive(), grant.step(), Stall(die), *says, Close()], *later)

    return make


def test_a_lease_is_resumed_and_says_so(lives: Lives, die: Gate, grant: HonestGrant, attached: Attached) -> None:
    with (
        lives([Receive(), granted_again(grant), *HOLD]) as daemon,
        attached(engine_name="an engine") as weights,
    ):
        lease, told = lease_of(weights), Told(lease_of(weights))
        assert (lease.state, weights.state, lease.nonce) == ("connected", "connected", grant.message.nonce)
        die.open()
        assert told.next("lost") == ("the daemon is gone",)
        (detached_s,) = told.next("resumed")
        assert FIRST_S / 2 <= detached_s < 5
        assert (lease.state, lease.reason, lease.obstacle) == ("connected", None, None)
        assert (lease.losses, lease.resumes, lease.nonce) == (1, 1, NONCE)
        assert lease.generation == grant.message.generation
        assert lease.ping() < 5
        weights.verify()
        resume = daemon.wires[1].messages[0]
    assert isinstance(resume, Resume)
    assert (resume.generation, resume.manifest_sha256) == (grant.message.generation, grant.message.manifest_sha256)
    assert (resume.name, resume.pid) == ("an engine", os.getpid())
    assert told.nothing_more
    assert (lease.state, weights.state) == ("closed", "closed")


def test_a_lease_is_lost_and_resumed_again_and_again(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    ends = [die, *(Gate() for _ in range(5))]
    later = [
        [Receive(), granted_again(grant, nonce=str(number) * 32), Stall(end), Close()]
        for number, end in enumerate(ends[1:], start=1)
    ]
    with lives(*later, [Receive(), granted_again(grant), *HOLD]), attached() as weights:
        lease, told = lease_of(weights), Told(lease_of(weights))
        for number, end in enumerate(ends, start=1):
            end.open()
            told.next("lost")
            told.next("resumed")
            assert lease.nonce == (str(number) * 32 if number < len(ends) else NONCE)
        assert (lease.losses, lease.resumes) == (6, 6)


DETOURS: dict[str, tuple[list[Step], str]] = {
    "closed before reading": ([Close()], "died before it answered"),
    "reset": ([Reset()], "died before it answered"),
    "closed after reading": ([Receive(), Close()], "died before it answered"),
    "closed while it adopts": ([Receive(), Send(LOADING), Close()], "died before it answered"),
    "half an answer": ([Receive(), SendRaw(frame(Pong(token=1))[:9]), Close()], "died before it answered"),
    "stopping": ([Receive(), Send(Refused(code="daemon_draining", message="stopping"))], "stopping"),
    "failed": ([Receive(), Send(Refused(code="daemon_failed", message="bad files"))], "bad files"),
    "not this user": ([Send(Refused(code="untrusted_client", message="not you")), Close()], "not you"),
    "no such code": ([Receive(), Send(Refused(code="of_tomorrow", message="?"))], "does not know"),
    "no config was told": ([Receive(), Send(Refused(code="config_mismatch", message="?"))], "was not told"),
    "something unasked": ([Receive(), Send(Pong(token=1))], "not asked"),
    "an event": ([Receive(), Send(Event(kind="draining", generation=None, message="?"))], "not asked"),
    "no frame": ([Receive(), SendRaw(b"HTTP/1.1 400 Bad Request\r\n\r\n")], "not a weightcached frame"),
}


@pytest.mark.parametrize("detour", DETOURS)
def test_no_other_answer_ends_the_search(
    detour: str, lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    steps, obstacle = DETOURS[detour]
    back, go_on = Gate(), Gate()
    last: list[Step] = [Receive(), Open(back), Stall(go_on), granted_again(grant), *HOLD]
    with (
        lives([*steps, *([] if isinstance(steps[-1], Close | Reset) else [ReceiveToEnd()])], last),
        attached() as weights,
    ):
        lease, told = lease_of(weights), Told(lease_of(weights))
        die.open()
        told.next("lost")
        back.wait()
        assert (lease.state, lease.reason) == ("detached", "the daemon is gone")
        assert obstacle in (lease.obstacle or "")
        go_on.open()
        told.next("resumed")
        assert lease.obstacle is None
        weights.verify()


def test_descriptors_are_not_taken_twice(lives: Lives, die: Gate, grant: HonestGrant, attached: Attached) -> None:
    """A grant that maps anew is no answer to Resume; what came with it is closed (the fixture counts)."""
    back, go_on = Gate(), Gate()
    last: list[Step] = [Receive(), Open(back), Stall(go_on), granted_again(grant), *HOLD]
    with lives([Receive(), grant.step(), ReceiveToEnd()], last), attached() as weights:
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        back.wait()
        assert "descriptors came with" in (lease_of(weights).obstacle or "")
        assert lease_of(weights).state == "detached"
        go_on.open()
        told.next("resumed")


def test_a_silent_daemon_is_left_and_one_that_says_that_it_is_at_it_is_not(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    """Twice the heartbeat of silence is too long; ten times as long with a word now and then is not."""

    class KeepSaying:
        def run(self, wire: Wire) -> None:
            for _ in range(20):
                Send(LOADING).run(wire)
                assert not wire.wait(0, timeout_s=0.05), "the client has gone"

    silent: list[Step] = [Receive(), Stall()]
    patient: list[Step] = [Receive(), KeepSaying(), granted_again(grant), *HOLD]
    with lives(silent, patient) as daemon, attached(heartbeat_s=0.1) as weights:
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        (detached_s,) = told.next("resumed")
        assert detached_s > 20 * 0.05 + 0.2
        assert len(daemon.wires) == 3


@pytest.mark.parametrize("repaired", ["the socket is there again", "a daemon listens again"])
def test_a_place_where_nobody_is_yet_is_looked_at_again(
    repaired: str, lives: Lives, die: Gate, grant: HonestGrant, place: Place, attached: Attached
) -> None:
    with lives([Stall()]) as daemon:
        weights = attached()
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        if repaired == "a daemon listens again":
            os.link(place.socket_path, place.socket_path.with_suffix(".kept"))
    assert not place.socket_path.exists()
    if repaired == "a daemon listens again":
        place.socket_path.with_suffix(".kept").rename(place.socket_path)
    expected = "weights are cached" if repaired == "the socket is there again" else "nobody answers"
    with weights:
        lease = lease_of(weights)
        deadline_s = time.monotonic() + 20
        while expected not in (lease.obstacle or ""):
            assert time.monotonic() < deadline_s, lease.obstacle
        assert lease.state == "detached"
        place.socket_path.unlink(missing_ok=True)
        with LyingDaemon(place.socket_path, [Receive(), granted_again(grant), *HOLD]):
            told.next("resumed")
            lease.close()
    assert len(daemon.wires) >= 1


def test_a_place_that_others_can_write_to_is_not_trusted_again(
    lives: Lives,
    die: Gate,
    grant: HonestGrant,
    place: Place,
    attached: Attached,
    log: pytest.LogCaptureFixture,
) -> None:
    """The checks of an attach: not one byte is sent to whoever listens there."""
    with lives([Receive(), granted_again(grant), *HOLD]) as daemon, attached() as weights:
        lease, told = lease_of(weights), Told(lease_of(weights))
        place.directory.chmod(0o777)
        die.open()
        told.next("lost")
        deadline_s = time.monotonic() + 20
        while "others can write" not in (lease.obstacle or ""):
            assert time.monotonic() < deadline_s, lease.obstacle
        assert lease.state == "detached"
        assert all(not wire.messages for wire in daemon.wires[1:])
    assert any("others can write" in record.getMessage() and record.levelname == "WARNING" for record in log.records)


def test_the_search_is_not_in_a_hurry(lives: Lives, die: Gate, attached: Attached) -> None:
    enough = threading.Event()
    times_s: list[float] = []

    class Note:
        def run(self, wire: Wire) -> None:
            times_s.append(time.monotonic())
            if len(times_s) == 6:
                enough.set()

    with lives([Note(), Close()]), attached():
        die.open()
        assert enough.wait(20)
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert all(pause_s >= FIRST_S * 2**number * 0.99 for number, pause_s in enumerate(pauses_s, start=0))


def test_pauses_double_up_to_a_limit_and_are_not_the_same_for_all() -> None:
    longest = Backoff(part=lambda: 1.0)
    assert [longest.next_s() for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    firsts = {Backoff().next_s() for _ in range(50)}
    assert len(firsts) > 25
    assert all(FIRST_S / 2 <= first <= FIRST_S for first in firsts)
    assert LONGEST_S == 2.0


def test_a_question_under_way_is_told_at_once_and_not_answered_by_the_next_daemon(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    with lives([Receive(), granted_again(grant), *HOLD], says=[Receive()]), attached() as weights:
        told = Told(lease_of(weights))
        die.open()
        started_s = time.monotonic()
        with pytest.raises(DaemonUnreachable, match="lost its connection"):
            lease_of(weights).status(timeout_s=60)
        assert time.monotonic() - started_s < 10
        told.next("lost")
        told.next("resumed")


EVENTS = [
    Event(kind="published", generation="d" * 32, message="a new one"),
    Event(kind="failed", generation=None, message="no update"),
    Event(kind="draining", generation=None, message="the daemon stops"),
]


def test_events_are_handed_on_and_the_last_word_explains_the_end(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    with lives([Receive(), granted_again(grant), *HOLD], says=[*map(Send, EVENTS)]), attached() as weights:
        told = Told(lease_of(weights))
        die.open()
        assert [told.next("event") for _ in EVENTS] == [(event,) for event in EVENTS]
        assert told.next("lost") == ("the daemon is gone, and had said: draining, the daemon stops",)
        told.next("resumed")


def test_who_registers_late_is_told_what_was_missed(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    go_on = Gate()
    with lives([Receive(), Stall(go_on), granted_again(grant), *HOLD]), attached() as weights:
        lease = lease_of(weights)
        die.open()
        assert lease.wait_for("detached", timeout_s=20)
        late: list[str] = []
        lease.on_lost(late.append)
        assert late == ["the daemon is gone"]
        assert lease.wait_lost(0)
        told: queue.Queue[float] = queue.Queue()
        lease.on_resumed(told.put)
        go_on.open()
        told.get(timeout=20)
        assert late == ["the daemon is gone"]
        assert not lease.wait_lost(0)


def test_waiting_for_a_loss_sees_one_that_lasted_a_moment(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    waiting = threading.Event()
    seen: list[bool] = []
    with lives([Receive(), granted_again(grant), *HOLD]), attached() as weights:

        def wait() -> None:
            waiting.set()
            seen.append(lease_of(weights).wait_lost(20))

        told = Told(lease_of(weights))
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        die.open()
        told.next("lost")
        told.next("resumed")
        thread.join()
    assert seen == [True]


def test_a_callback_that_fails_does_not_end_the_search(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached, log: pytest.LogCaptureFixture
) -> None:
    with lives([Receive(), granted_again(grant), *HOLD]), attached() as weights:
        lease_of(weights).on_lost(lambda _: 1 / 0)
        lease_of(weights).on_resumed(lambda _: 1 / 0)
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        told.next("resumed")
        assert lease_of(weights).ping() < 5
    assert any(record.exc_info for record in log.records)


CLOSING: dict[str, list[Step]] = {
    "while it pauses": [Close()],
    "while a daemon says nothing": [Receive(), Stall()],
    "while a daemon says that it is at it": [Receive(), Repeat(Send(LOADING))],
    "in the middle of a frame": [Receive(), SendRaw(frame(LOADING)[:20]), Stall()],
}


@pytest.mark.parametrize("moment", CLOSING)
def test_closing_never_waits_for_a_daemon(moment: str, lives: Lives, die: Gate, attached: Attached) -> None:
    back = Gate()
    with lives([Close()], [Close()], [Open(back), *CLOSING[moment]]):
        weights = attached()
        die.open()
        back.wait()
        if moment == "while it pauses":
            assert lease_of(weights).state == "detached"
        started_s = time.monotonic()
        weights.close()
        assert time.monotonic() - started_s < 1
        assert lease_of(weights).state == "closed"


def test_closing_from_a_callback_ends_the_search(lives: Lives, die: Gate, attached: Attached) -> None:
    closed = threading.Event()
    with lives([Receive(), Stall()]) as daemon:
        weights = attached()

        def close(_: str) -> None:
            weights.close()
            closed.set()

        lease_of(weights).on_lost(close)
        die.open()
        assert closed.wait(20)
        weights.close()
        assert lease_of(weights).state == "closed"
        assert len(daemon.wires) == 1


def test_a_child_forked_in_the_search_has_no_connection_and_the_parent_goes_on(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    back, go_on = Gate(), Gate()
    with (
        lives([Receive(), Open(back), Stall(go_on), granted_again(grant), *HOLD]) as daemon,
        attached() as weights,
    ):
        lease, told = lease_of(weights), Told(lease_of(weights))
        die.open()
        told.next("lost")
        back.wait()
        theirs = {wire.connection.fileno() for wire in daemon.wires} | {daemon._listener.fileno()}
        before = {fd for fd, what in open_fds().items() if what.startswith("socket:")} - theirs

        def work() -> None:
            assert {threading.current_thread()} == set(threading.enumerate())
            here = {fd for fd, what in open_fds().items() if what.startswith("socket:")} - theirs
            assert len(before - here) == 1, (before, here)
            assert (lease.state, "forked child" in (lease.reason or "")) == ("detached", True)
            assert not lease.wait_for("connected", timeout_s=0)
            weights.close()
            assert weights.state == "closed"

        in_child(work)
        go_on.open()
        told.next("resumed")
        assert told.nothing_more
        assert lease.ping() < 5


def test_the_watcher_says_when_it_fails_itself(
    lives: Lives,
    die: Gate,
    attached: Attached,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lives([Stall()]), attached() as weights:
        monkeypatch.setattr(lease_of(weights), "_come_back", lambda: 1 / 0)
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        assert "the log has the reason" in told.next("lost")[0]
        assert lease_of(weights).state == "detached"
    assert any("please report it" in record.getMessage() for record in log.records)


# Other weights


@contextmanager
def stale(
    lives: Lives, die: Gate, answer: Step, attached: Attached, *then: list[Step], **options: Any
) -> Iterator[tuple[LyingDaemon, WeightSet, Told]]:
    """An engine that lost its daemon and is told ``answer`` to its Resume."""
    with (
        lives([Receive(), answer, ReceiveToEnd()], *then) as daemon,
        attached(**options) as weights,
    ):
        told = Told(lease_of(weights))
        die.open()
        told.next("lost")
        yield daemon, weights, told


def gone(grant: HonestGrant) -> dict[str, Step]:
    return {
        "refused": Send(Refused(code="generation_gone", message="other weights are served", found="generation e…")),
        "another generation": granted_again(grant, generation="e" * 32),
        "another manifest": granted_again(grant, manifest_sha256="f" * 64),
    }


@pytest.mark.parametrize("how", ["refused", "another generation", "another manifest"])
def test_other_weights_make_the_lease_stale(
    how: str, lives: Lives, die: Gate, grant: HonestGrant, attached: Attached, log: pytest.LogCaptureFixture
) -> None:
    with stale(lives, die, gone(grant)[how], attached, [Receive(), Close()]) as (daemon, weights, told):
        reason, report = told.next("stale")
        lease = lease_of(weights)
        assert "other weights" in reason
        assert report is None
        assert (lease.state, weights.state, lease.reason) == ("stale", "stale", reason)
        assert isinstance(daemon.wires[2].messages[0], Status)
        late: list[tuple[str, object]] = []
        lease.on_stale(lambda *words: late.append(words))
        assert late == [(reason, None)]
        assert lease.wait_lost(0)
        assert lease.wait_for("stale", timeout_s=0)
        with pytest.raises(DaemonUnreachable, match="stale"):
            lease.ping()
        weights.verify()
        assert len(daemon.wires) == 3  # nobody follows: it is not asked again
    assert told.nothing_more
    assert any(record.levelname == "WARNING" and "no lease any more" in record.getMessage() for record in log.records)


def test_a_stale_lease_is_had_again_where_the_place_serves_what_is_in_use(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    """As after a rollback to it."""
    other = READY.model_copy(update={"generation": "e" * 32})
    ours = READY.model_copy(update={"generation": grant.message.generation})
    ask, again = Gate(), Gate()
    lives_after: list[list[Step]] = [
        [Receive(), Stall(ask), Send(other)],
        [Receive(), Stall(again), Send(ours)],
        [Receive(), granted_again(grant), *HOLD],
    ]
    with stale(lives, die, gone(grant)["refused"], attached, *lives_after) as (_, weights, told):
        lease = lease_of(weights)
        served: list[str | None] = []
        lease.on_served(lambda report: served.append(report.generation))
        ask.open()
        told.next("stale")
        again.open()
        told.next("resumed")
        assert (lease.state, served) == ("connected", [other.generation])


def test_a_daemon_that_is_silent_is_not_waited_for_by_who_stages_with_a_stale_lease(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    after: list[list[Step]] = [[Receive(), Close()], [Receive(), Stall()]]
    with stale(lives, die, gone(grant)["refused"], attached, *after, heartbeat_s=0.5) as (_, weights, told):
        told.next("stale")
        began_s = time.monotonic()
        with pytest.raises((DaemonNotReady, DaemonUnreachable)):
            weights.stage(timeout_s=600)
        assert time.monotonic() - began_s < 60


def test_closing_while_a_stale_lease_asks_what_is_served_now(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached
) -> None:
    asked = Gate()
    with stale(lives, die, gone(grant)["refused"], attached, [Receive(), Open(asked), Stall()]) as (_, weights, told):
        asked.wait()
        started_s = time.monotonic()
        weights.close()
        assert time.monotonic() - started_s < 1
        assert told.nothing_more


def test_nothing_moves_after_close(lives: Lives, attached: Attached) -> None:
    """What the watcher was about to say when the lease was closed: policy ``exit`` would end this very process."""
    with lives([Stall()]):
        weights = attached(on_stale="exit")
        lease, told = lease_of(weights), Told(lease_of(weights))
        weights.close()
        lease._lose("too late")
        lease._go_stale(GenerationGone("too late"), None)
        assert (lease.state, lease.losses) == ("closed", 0)
        assert told.nothing_more


def test_a_hello_tells_how_often_this_process_fell_back(
    model: Path, place: Place, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    """And a Resume does; a forked child has not fallen back by itself yet."""

    def fall_back(times: int) -> None:
        for _ in range(times):
            attached(mode="client").close()

    def told_by(messages: list[Message]) -> int:
        hello = messages[0]
        assert isinstance(hello, Hello | Resume)
        return hello.disk_fallbacks

    def work() -> None:
        fall_back(2)
        with LyingDaemon(
            place.socket_path, [Receive(), grant.step(), Close()], [Receive(), granted_again(grant), *HOLD]
        ) as daemon:
            with attached() as weights:
                assert lease_of(weights).wait_lost(20)
                assert lease_of(weights).wait_for("connected", timeout_s=20)
            assert [told_by(wire.messages) for wire in daemon.wires] == [2, 2]

        def again() -> None:
            fall_back(1)
            with serve(grant.step()) as daemon, attached():
                assert told_by(daemon.wires[0].messages) == 1

        in_child(again)

    in_child(work)


def test_errors_of_this_process_do_not_end_the_search(
    lives: Lives, die: Gate, grant: HonestGrant, attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for a new connection: that may pass."""
    tried = threading.Event()
    with lives([Receive(), granted_again(grant), *HOLD]), attached() as weights:
        told = Told(lease_of(weights))

        def none_left() -> socket.socket:
            tried.set()
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr("weightcached.client.connect.new_connection", none_left)
            die.open()
            told.next("lost")
            assert tried.wait(20)
            deadline_s = time.monotonic() + 20
            while lease_of(weights).obstacle is None:
                assert time.monotonic() < deadline_s
            assert "Too many open files" in (lease_of(weights).obstacle or "")
        told.next("resumed")
