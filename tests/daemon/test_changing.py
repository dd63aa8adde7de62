"""A change on one rank, with real daemons: what is served stays served until the decision, and then other weights are,
at once and for everybody who asks; whatever fails, what was served is served on."""

import os
import signal
from pathlib import Path

import pytest
import zmq

from tests.support.checkpoints import tiny_llama
from tests.support.commanding import Changer, from_directory, new_transaction, other_weights, standings
from tests.support.daemons import TIMEOUT_S, Daemon, ask, converse, daemon, digest_of, hello_for, scripted_daemon
from weightcached.protocol.control import (
    CONTROL_REQUESTS,
    Decide,
    Decided,
    Describe,
    FromHeld,
    Prepare,
    RankState,
    ReadDecision,
)
from weightcached.protocol.control_channel import REQUEST_ID_BYTES
from weightcached.protocol.control_sockets import endpoint
from weightcached.protocol.errors import (
    ConfigurationError,
    GenerationGone,
    InvalidOption,
    UpdateConflict,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import encode_frame
from weightcached.protocol.messages import Event, Grant, Hello, Message, Ping, Pong, Refused, Report, Resume, Switch


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return other_weights(model, tmp_path / "other")


def granted_for(served: Daemon, hello: Hello) -> tuple[Grant, OwnedFds]:
    """What is granted to that; the caller closes the descriptors."""
    channel = served.connect()
    try:
        frame = converse(channel, hello)
    finally:
        channel.close()
    assert isinstance(frame.message, Grant), frame.message
    return frame.message, frame.fds


def test_an_update_changes_what_is_granted_and_leaves_leases_alone(model: Path, other: Path, runtime_dir: Path) -> None:
    with daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        changer = Changer(served)
        lease = served.connect()
        granted, fds = served.attach(lease)
        with fds:
            before = os.pread(fds[1], 1 << 30, 0)
            transaction, prepared = changer.prepare(from_directory(other))
            assert prepared.state == "ready"
            assert [standing for _, standing in standings(prepared)] == ["current", "prepared"]
            assert prepared.open == transaction
            _grant, again = served.attach()  # prepared, and granted to nobody
            with again:
                assert _grant.generation == granted.generation
            decided = changer.decide(transaction, commit=True)
            assert decided.outcome == "committed"
            event = lease.receive().message
            assert isinstance(event, Event)
            assert (event.kind, event.version) == ("published", decided.version)
            assert "kv_cache" in event.drops
            after = changer.state()
            assert standings(after) == [(event.generation, "current"), (granted.generation, "previous")]
            assert [one.leases for one in after.generations] == [0, 1]
            assert os.pread(fds[1], 1 << 30, 0) == before
            assert ask(lease, Ping(token=1)) == Pong(token=1)
            grant, of_other = granted_for(served, hello_for(other, digest=digest_of(other)))
            with of_other:
                assert grant.generation == event.generation
                new = os.pread(of_other[1], 1 << 30, 0)
                assert new != before
                assert len(new) == len(before)
            # Exactly its own checkpoint is what an engine gets that asks for it, as long as it is held.
            old, fds_of_old = served.attach()
            with fds_of_old:
                assert old.generation == granted.generation
            grant, current = granted_for(served, hello_for(model, want="current"))
            with current:
                assert grant.generation == event.generation
        lease.close()


def test_rolled_back_and_forward_without_a_load(model: Path, other: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as served:
        first = served.wait_until("ready")
        changer = Changer(served)
        forward = changer.update(from_directory(other))
        newer = forward.current
        assert newer not in (None, first.generation)
        back = changer.update(FromHeld(version=str(first.version)))
        assert standings(back) == [(first.generation, "current"), (newer, "previous")]
        again = changer.update(FromHeld(version=forward.generations[0].version))
        assert standings(again) == [(newer, "current"), (first.generation, "previous")]
        stages = [record.get("stage") for record in served.log.records()]
        assert stages.count("start worker") == 2
        with pytest.raises(AssertionError, match="generation_gone"):
            changer.update(FromHeld(version="digest:" + "0" * 64))


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        ({"kill_at": "memory"}, "worker_died", "SIGKILL"),
        ({"exit_at": "planned"}, "worker_died", "status 0"),
        ({"manifest": "missing"}, "transfer", "lacks the manifest"),
        ({"flip": 4095}, "transfer", "1 that differ: weight"),
    ],
    ids=str,
)
def test_a_change_that_fails_returns_to_ready_with_the_reason(
    model: Path, other: Path, runtime_dir: Path, tmp_path: Path, script: dict, code: str, why: str
) -> None:
    attempts = tmp_path / "attempts"
    attempts.touch()
    spoiled = {**script, "spoil_from_attempt": 2, "attempts": str(attempts)}
    with scripted_daemon(model, runtime_dir, script=spoiled) as served:
        first = served.wait_until("ready")
        changer = Changer(served)
        transaction, failed = changer.prepare(from_directory(other))
        assert failed.change is not None
        assert (failed.change.state, failed.change.error_code) == ("failed", code)
        assert (failed.state, standings(failed)) == ("ready", [(first.generation, "current")])
        assert why in str(failed.change.error)
        assert served.report().last_error is None, "nothing is wrong with what is served"
        grant, fds = served.attach()
        with fds:
            assert grant.generation == first.generation
        with pytest.raises(UpdateConflict):
            changer.decide(transaction, commit=True)
        assert changer.decide(transaction, commit=False).outcome == "aborted"
        assert changer.state().open is None


def test_another_config_is_refused_before_anything_is_read(model: Path, runtime_dir: Path, tmp_path: Path) -> None:
    larger = tiny_llama(tmp_path / "larger", num_hidden_layers=3)
    with scripted_daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        changer = Changer(served)
        _, failed = changer.prepare(from_directory(larger))
        assert failed.change is not None
        assert failed.change.error_code == ConfigurationError.code
        assert "num_hidden_layers" in str(failed.change.error)
        _, missing = changer.prepare(from_directory(tmp_path / "nowhere"), transaction=failed.open)
        assert missing.change is not None
        assert missing.change.transaction == failed.change.transaction  # it was done already: the same answer
        assert sum(record.get("stage") == "start worker" for record in served.log.records()) == 1


def test_every_command_may_be_sent_again(model: Path, other: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        changer = Changer(served)
        base = changer.current()
        transaction = new_transaction()
        assert changer.open(transaction).open == changer.open(transaction).open == transaction
        for _ in range(2):
            changer.begin(transaction, from_directory(other), base=base)
            changer.ended(transaction)
        first = changer.decide(transaction, commit=True)
        assert changer.decide(transaction, commit=True) == first
        assert changer.ask(ReadDecision(transaction=transaction), Decided) == first
        with pytest.raises(UpdateConflict):
            changer.decide(transaction, commit=False)
        assert changer.begin(transaction, from_directory(other), base=base).change == changer.state().change
        assert len(changer.state().generations) == 2


def test_what_the_rules_forbid_is_refused(model: Path, other: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        changer = Changer(served)
        with pytest.raises(UpdateConflict):  # not open
            changer.begin(new_transaction(), from_directory(other))
        changer.open(transaction := new_transaction())
        with pytest.raises(UpdateConflict):  # one at a time
            changer.open(new_transaction())
        with pytest.raises(UpdateConflict):  # on top of something else
            changer.begin(transaction, from_directory(other), base="0" * 32)
        source = from_directory(other)
        asked = Prepare(transaction=transaction, leader="host-tp0of9", base=changer.current(), source=source)
        with pytest.raises(InvalidOption):
            changer.ask(asked, RankState)
        assert changer.decide(unknown := new_transaction(), commit=False).outcome == "aborted"
        assert changer.ask(ReadDecision(transaction=unknown), Decided).outcome == "aborted"
        with pytest.raises(UpdateConflict):
            changer.ask(Decide(transaction=new_transaction(), commit=True), Decided)


def test_an_abort_while_preparing_ends_the_worker(model: Path, other: Path, runtime_dir: Path, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    attempts.touch()
    script = {"hang_at": "progress", "spoil_from_attempt": 2, "attempts": str(attempts)}
    with scripted_daemon(model, runtime_dir, script=script) as served:
        first = served.wait_until("ready")
        changer = Changer(served)
        changer.open(transaction := new_transaction())
        changer.begin(transaction, from_directory(other))
        served.wait_logged("progress", stage="read", first=0)
        updating = served.wait_until("updating")
        assert updating.generation == first.generation
        grant, fds = served.attach()
        with fds:
            assert grant.generation == first.generation
        assert changer.decide(transaction, commit=False).outcome == "aborted"
        after = changer.state()
        assert after.change is not None
        assert (after.state, after.change.state) == ("ready", "aborted")
        assert standings(after) == [(first.generation, "current")]
        assert len(served.report().held) == 1


def said_together(served: Daemon, *requests: Message) -> None:
    """Send all of them so that the daemon finds all at once, and wait until all are answered."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint(served.place.control_path))
        for some in ((Describe(),), requests):  # the first brings the connection about
            if some is requests:
                os.kill(served.pid, signal.SIGSTOP)
            for number, request in enumerate(some):
                dealer.send_multipart([number.to_bytes(REQUEST_ID_BYTES), encode_frame(CONTROL_REQUESTS, request)])
            os.kill(served.pid, signal.SIGCONT)
            for _ in some:
                assert dealer.poll(int(TIMEOUT_S * 1000))
                dealer.recv_multipart()


def test_an_abort_right_behind_the_command_to_prepare_leaves_the_rank_as_it_was(
    model: Path, other: Path, runtime_dir: Path
) -> None:
    """Preparing had not begun to run: it is over all the same, and another change may begin."""
    with scripted_daemon(model, runtime_dir) as served:
        served.wait_until("ready")
        changer = Changer(served)
        changer.open(transaction := new_transaction())
        asked = Prepare(
            transaction=transaction,
            leader=served.place.device,
            base=changer.current(),
            source=from_directory(other),
        )
        said_together(served, asked, Decide(transaction=transaction, commit=False))
        state = changer.state()
        assert state.change is not None
        assert (state.state, state.open, state.change.state) == ("ready", None, "aborted")
        assert len(changer.update(from_directory(other)).generations) == 2


def test_a_lease_switches_and_the_one_it_had_is_freed(model: Path, other: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir, "--keep-generations", "0") as served:
        first = served.wait_until("ready")
        changer = Changer(served)
        lease = served.connect()
        try:
            _, fds = served.attach(lease)
            fds.close()
            newer = changer.update(from_directory(other)).current
            assert isinstance(lease.receive().message, Event)
            assert len(changer.state().generations) == 2  # it is leased
            refused = ask(lease, Switch(generation="0" * 32))
            assert isinstance(refused, Refused)
            assert refused.code == GenerationGone.code
            assert refused.expected == f"generation {'0' * 32}"
            assert [one.leases for one in changer.state().generations] == [0, 1]
            lease.send(Switch())
            frame = lease.receive()
            with frame.fds:
                assert isinstance(frame.message, Grant)
                assert frame.message.generation == newer
                assert len(frame.fds) == 2
            served.wait_logged("generation dropped", generation=first.generation)
            assert [(one.generation, one.leases) for one in changer.state().generations] == [(newer, 1)]
            gone = ask(lease, Switch(generation=first.generation))
            assert isinstance(gone, Refused)
        finally:
            lease.close()
        resuming = served.connect()
        answer = ask(
            resuming,
            Resume(
                client_version="0",
                name="engine",
                pid=os.getpid(),
                generation=str(first.generation),
                manifest_sha256="0" * 64,
            ),
        )
        resuming.close()
        assert isinstance(answer, Refused)
        assert answer.code == GenerationGone.code


def test_status_shows_what_is_held_and_where_a_link_led_when_it_was_loaded(
    model: Path, other: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(model)
    with scripted_daemon(latest, runtime_dir) as served:
        served.wait_until("ready")
        latest.unlink()
        latest.symlink_to(other)
        held = Changer(served).update(from_directory(latest)).generations
        assert [one.origin for one in held] == [str(other), str(model)]
        report = served.report()
        assert isinstance(report, Report)
        assert [one.standing for one in report.held] == ["current", "previous"]
        assert report.generations == 2
        assert report.model == str(other)
        assert report.own_memory_nbytes < 64 << 20
        assert served.stop(signal.SIGTERM) == 0
