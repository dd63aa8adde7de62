"""What an engine does when its place serves other weights: the three policies. Processes that end are real ones."""

import fcntl
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightcached.client.stale
from tests.support.forked import in_child
from tests.support.reports import READY
from weightcached.client import STALE_EXIT, WeightSet
from weightcached.protocol.errors import DaemonUnreachable, InvalidOption
from weightcached.protocol.messages import Refused, Report
from weightcached.protocol.places import Place
from weightcached.protocol.testing import Close, HonestGrant, LyingDaemon, Receive, ReceiveToEnd, Send, Step

Attached = Callable[..., WeightSet]

GONE = Refused(code="generation_gone", message="other weights are served here now")


@pytest.fixture
def forgetful(place: Place, grant: HonestGrant) -> LyingDaemon:
    """Grants, dies, comes back without the generation, and says what it has instead."""
    first: list[Step] = [Receive(), grant.step(), Close()]
    second: list[Step] = [Receive(), Send(GONE), ReceiveToEnd()]
    return LyingDaemon(place.socket_path, first, second, [Receive(), Send(READY), ReceiveToEnd()])


@pytest.mark.parametrize("policy", ["notify", "", None, 75])
def test_a_policy_that_is_none(policy: Any, attached: Attached) -> None:
    with pytest.raises(InvalidOption, match="on_stale"):
        attached(on_stale=policy)


def test_keep_goes_on_and_says_so(forgetful: LyingDaemon, attached: Attached, log: pytest.LogCaptureFixture) -> None:
    with forgetful, attached() as weights:
        assert weights.lease is not None
        assert weights.lease.wait_for("stale", timeout_s=20)
        weights.verify()

        def work() -> None:
            """Of a forked child, which has nothing to do with what its parent's place serves now."""
            with pytest.raises(DaemonUnreachable, match="forked child"):
                weights.stage()

        in_child(work)
    assert any("no lease any more" in record.getMessage() for record in log.records)


def test_a_function_is_notified_once_with_the_reason_and_what_is_served_now(
    forgetful: LyingDaemon, attached: Attached
) -> None:
    told = threading.Event()
    calls: list[tuple[str, Report | None]] = []

    def on_stale(reason: str, report: Report | None) -> None:
        calls.append((reason, report))
        told.set()

    with forgetful, attached(on_stale=on_stale) as weights:
        assert told.wait(20)
        assert weights.state == "stale"
        weights.verify()
    assert len(calls) == 1
    assert "other weights are served here now" in calls[0][0]
    assert calls[0][1] == READY


def ended(work: Callable[[], object]) -> tuple[int, str]:
    """Fork, call ``work``, then wait to be ended. Its exit status, and what it wrote to standard error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writing, 2)
            work()
            select.select([], [], [], 60)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def test_exit_ends_the_process_with_a_status_of_its_own_and_a_message(
    place: Place, forgetful: LyingDaemon, attached: Attached, tmp_path: Path
) -> None:
    """What was registered is called first, and what was written is not lost. Nothing else runs."""
    last_words = tmp_path / "last words"

    def work() -> None:
        sys.stdout = open(tmp_path / "output", "w")  # noqa: SIM115  # the process's end closes it
        print("written, and not flushed")
        lease = attached(on_stale="exit").lease
        assert lease is not None
        lease.on_stale(lambda reason, _: last_words.write_text(reason))

    with forgetful:
        status, said = ended(work)
    assert status == STALE_EXIT == 75
    assert "ends with status 75" in said
    assert str(place.socket_path) in said
    assert "other weights are served here now" in said
    assert "other weights are served here now" in last_words.read_text()
    assert (tmp_path / "output").read_text() == "written, and not flushed\n"


def test_exit_does_not_wait_for_who_does_not_read(
    forgetful: LyingDaemon, attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightcached.client.stale, "_FLUSH_TIMEOUT_S", 0.2)
    reading, writing = os.pipe()
    capacity_bytes = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    assert os.write(writing, bytes(capacity_bytes)) == capacity_bytes

    def work() -> None:
        sys.stdout = os.fdopen(writing, "w")
        sys.stdout.write("more")
        attached(on_stale="exit")

    with forgetful:
        status, said = ended(work)
    os.close(reading)
    os.close(writing)
    assert status == STALE_EXIT
    assert "ends with status 75" in said


def test_a_forked_child_of_an_engine_with_policy_exit_goes_on(
    place: Place, grant: HonestGrant, attached: Attached
) -> None:
    with LyingDaemon(place.socket_path, [Receive(), grant.step(), ReceiveToEnd()]):
        weights = attached(on_stale="exit")

        def work() -> None:
            assert weights.state == "detached"
            assert threading.active_count() == 1
            weights.verify()

        in_child(work)
        weights.close()
