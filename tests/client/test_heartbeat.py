"""Heartbeats: a daemon that is stopped, or hangs, is noticed within twice the heartbeat; one that lives never is.

The rule alone first, on a clock of its own; then connections, with a lying daemon and a real one that is stopped.
"""

import os
import queue
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.daemons import Daemon, scripted_daemon
from weightcached.client import WeightSet, attach
from weightcached.client.heartbeat import Heartbeat
from weightcached.client.lease import Lease
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.messages import Event, Ping, Pong
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    AnswerPings,
    Gate,
    HonestGrant,
    LyingDaemon,
    Open,
    Receive,
    ReceiveToEnd,
    Repeat,
    Send,
    SendRaw,
    Stall,
    frame,
)

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]

BEAT_S = 0.1
SLACK_S = 1.0
"""For a machine that is busy with other things; the bound itself is what the rule's own tests are about."""


def lease_of(weights: WeightSet) -> Lease:
    assert weights.lease is not None
    return weights.lease


def follow(heartbeat: Heartbeat, *, every_s: float, answers: Callable[[float], float | None], until_s: float) -> float:
    """Do as a connection does; when the daemon is given up, or ``until_s``. ``answers`` says when a question is."""
    now_s, answered_s = 0.0, None
    while now_s < until_s:
        wake_s = now_s + heartbeat.left_s(now_s)
        if answered_s is not None and answered_s <= wake_s:
            now_s, answered_s = answered_s, None
            heartbeat.heard(now_s)
            continue
        now_s = wake_s
        if heartbeat.dead(now_s):
            return now_s
        if heartbeat.due(now_s):
            heartbeat.asked(now_s)
            answered_s = answers(now_s)
    return until_s


TENTHS = st.integers(1, 1000).map(lambda tenths: tenths / 10)


@given(every_s=TENTHS, hangs_s=TENTHS, delay=st.floats(0, 0.99))
def test_a_daemon_that_hangs_is_given_up_within_twice_the_heartbeat(
    every_s: float, hangs_s: float, delay: float
) -> None:
    heard_s = [0.0]

    def answers(asked_s: float) -> float | None:
        answered_s = asked_s + delay * every_s
        if answered_s >= hangs_s:
            return None
        heard_s.append(answered_s)
        return answered_s

    given_up_s = follow(Heartbeat(every_s, now_s=0), every_s=every_s, answers=answers, until_s=hangs_s + 10 * every_s)
    assert given_up_s >= hangs_s
    assert given_up_s <= max(heard_s) + 2 * every_s + 1e-6


@given(every_s=TENTHS, delay=st.floats(0, 0.99))
def test_a_daemon_that_answers_in_time_is_never_given_up(every_s: float, delay: float) -> None:
    def answers(asked_s: float) -> float | None:
        return asked_s + delay * every_s

    until_s = 50 * every_s
    assert follow(Heartbeat(every_s, now_s=0), every_s=every_s, answers=answers, until_s=until_s) == until_s


def test_a_question_of_somebody_elses_is_a_heartbeat_too() -> None:
    heartbeat = Heartbeat(1.0, now_s=0)
    heartbeat.asked(0.5)
    heartbeat.asked(0.9)  # the first counts
    assert not heartbeat.due(1.4)
    assert not heartbeat.dead(1.4)
    assert heartbeat.dead(1.5)
    heartbeat.heard(1.45)
    assert not heartbeat.dead(1.5)
    assert heartbeat.left_s(1.5) == pytest.approx(0.95)


@pytest.mark.parametrize("heartbeat_s", [0, -1, float("nan"), float("inf"), 1e6])
def test_a_heartbeat_that_is_none(heartbeat_s: float, attached: Attached) -> None:
    with pytest.raises(InvalidOption, match="heartbeat_s"):
        attached(heartbeat_s=heartbeat_s)


def test_a_daemon_that_answers_keeps_the_lease_and_one_that_stops_answering_loses_it(
    grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    enough, silent = Gate(), Gate()

    class CountPings:
        """Ten of them are answered."""

        def run(self, wire: object) -> None:
            for _ in range(10):
                Receive().run(wire)  # type: ignore[arg-type]
                Send(lambda ping: Pong(token=ping.token)).run(wire)  # type: ignore[arg-type, attr-defined]

    with (
        serve(grant.step(), CountPings(), Open(enough), AnswerPings(silent), Stall()) as daemon,
        attached(heartbeat_s=BEAT_S) as weights,
    ):
        lease = lease_of(weights)
        enough.wait(timeout_s=20)
        assert (lease.state, lease.losses) == ("connected", 0)
        silent.open()
        since_s = time.monotonic()
        assert lease.wait_lost(20)
        assert time.monotonic() - since_s < 2 * BEAT_S + SLACK_S
        assert "has not answered for 0.1 s" in (lease.reason or "")
        pings = [message for message in daemon.wires[0].messages if isinstance(message, Ping)]
        assert len({ping.token for ping in pings}) == len(pings) >= 10


def test_whatever_is_said_is_a_sign_of_life(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    """Events without a pause, and no pong at all: whoever speaks is not hung."""
    events: queue.Queue[Event] = queue.Queue()
    event = Event(kind="failed", generation=None, message="words")
    with serve(grant.step(), Repeat(Send(event), every_s=BEAT_S / 5)), attached(heartbeat_s=BEAT_S) as weights:
        lease_of(weights).on_event(events.put)
        for _ in range(20):
            assert events.get(timeout=20) == event
        assert lease_of(weights).losses == 0


def test_half_a_frame_is_no_sign_of_life(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    bytes_of_it = [Receive(), *(SendRaw(frame(Pong(token=1))[at : at + 1]) for at in range(17)), ReceiveToEnd()]
    with serve(grant.step(), *bytes_of_it), attached(heartbeat_s=BEAT_S) as weights:
        assert lease_of(weights).wait_lost(20)
        assert "has not answered" in (lease_of(weights).reason or "")


def test_a_stopped_daemon_is_noticed_within_the_bound_and_found_again_when_it_goes_on(
    settled_model: object, place: Place
) -> None:
    lost: queue.Queue[float] = queue.Queue()
    resumed: queue.Queue[float] = queue.Queue()
    with scripted_daemon(settled_model, place.runtime_dir) as daemon:  # type: ignore[arg-type]
        daemon.wait_until("ready")
        with engine(daemon) as weights:
            lease = lease_of(weights)
            nonce = lease.nonce
            lease.on_lost(lambda _: lost.put(time.monotonic()))
            lease.on_resumed(resumed.put)
            for times in (1, 2):
                os.kill(daemon.pid, signal.SIGSTOP)
                stopped_s = time.monotonic()
                assert lost.get(timeout=20) - stopped_s < 2 * BEAT_S + SLACK_S
                assert lease.state == "detached"
                os.kill(daemon.pid, signal.SIGCONT)
                assert resumed.get(timeout=20) > 0
                assert (lease.state, lease.losses, lease.resumes) == ("connected", times, times)
                assert lease.ping(timeout_s=20) >= 0
            assert lease.nonce == nonce  # the same run of the daemon
            weights.verify()
        report = daemon.report()
        assert (report.attaches["granted"], report.attaches["resumed"]) == (1, 2)


def engine(daemon: Daemon) -> WeightSet:
    return attach(
        daemon.model_dir,
        mode="require",
        runtime_dir=daemon.place.runtime_dir,
        timeout_s=30,
        heartbeat_s=BEAT_S,
    )


def test_an_engine_that_was_stopped_itself_does_not_blame_the_daemon(steady_daemon: Daemon) -> None:
    """It wakes up long after every deadline; the daemon has answered all it was asked."""
    up_r, up_w = os.pipe()
    go_r, go_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            lease = lease_of(
                attach(steady_daemon.model_dir, runtime_dir=steady_daemon.place.runtime_dir, heartbeat_s=0.2)
            )
            os.write(up_w, b"up")
            os.read(go_r, 1)
            lease.ping(timeout_s=20)
            os._exit(10 + lease.losses)
        finally:
            os._exit(1)
    try:
        assert os.read(up_r, 2) == b"up"
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)  # what has to pass is time itself
        os.kill(pid, signal.SIGCONT)
        os.write(go_w, b"!")
    finally:
        _, status = os.waitpid(pid, 0)
        for fd in (up_r, up_w, go_r, go_w):
            os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 10
