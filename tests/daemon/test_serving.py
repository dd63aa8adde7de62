"""What a client is told, over a real socket to a real daemon: waiting, mismatches, proof, the grant, the lease.

The daemon's worker is scripted: it needs no torch, and stops where a test wants it to.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon, ask, connect, converse, digest_of, scripted_daemon
from weightcached.protocol.channel import Channel
from weightcached.protocol.content import open_weights, take_receipts, weight_files
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.digest_cache import DigestCache
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Grant, Loading, Message, Ping, Pong, Refused, Report, Status, Unproven


@contextmanager
def talking(daemon: Daemon) -> Iterator[Channel]:
    channel = daemon.connect()
    try:
        yield channel
    finally:
        channel.close()


def receive(channel: Channel, timeout_s: float = 30.0) -> Message:
    with (frame := channel.receive(deadline=Deadline.after(timeout_s))).fds:
        return frame.message


@contextmanager
def held_at(point: str, model: Path, runtime_dir: Path, **more: object) -> Iterator[tuple[Daemon, ExitStack]]:
    """A daemon whose worker waits at ``point`` until the stack is closed."""
    release = runtime_dir.parent / "release"
    os.mkfifo(release)
    script = {"hang_at": point, "release": str(release), **more}
    held = os.open(
        release, os.O_RDWR
    )  # for both, which never blocks, and keeps a byte for a worker that is yet to look
    try:
        with scripted_daemon(model, runtime_dir, script=script) as daemon, ExitStack() as stack:
            daemon.wait_logged("state", state="loading")
            stack.callback(os.write, held, b"!")
            yield daemon, stack
    finally:
        os.close(held)


def test_the_socket_is_there_before_anything_is_loaded(model: Path, runtime_dir: Path) -> None:
    with held_at("start", model, runtime_dir) as (daemon, _):
        report = daemon.report()
        assert report.state == "loading"
        assert report.resident_nbytes == 0
        assert report.generation is None


def test_who_waits_is_told_at_once_and_every_second_and_then_granted(model: Path, runtime_dir: Path) -> None:
    with held_at("progress", model, runtime_dir) as (daemon, worker), talking(daemon) as channel:
        daemon.wait_logged("progress", stage="read")
        started = time.monotonic()
        channel.send(daemon.hello())
        arrivals: list[float] = []
        told: list[Loading] = []
        while len(told) < 3:
            message = receive(channel)
            assert isinstance(message, Loading)
            told.append(message)
            arrivals.append(time.monotonic() - started)
        assert arrivals[0] < 0.9
        assert arrivals[2] < 3.0
        assert (told[2].stage, told[2].bytes_done, told[2].bytes_total) == ("read", 2048, 4096)
        worker.close()
        frame = channel.receive(deadline=Deadline.after(30))
        with frame.fds:
            assert isinstance(frame.message, Grant | Loading), frame.message
            while isinstance(frame.message, Loading):
                frame = channel.receive(deadline=Deadline.after(30))
            assert isinstance(frame.message, Grant)
            frame.fds.close()


def test_who_does_not_want_to_wait_longer_is_refused(model: Path, runtime_dir: Path) -> None:
    with held_at("progress", model, runtime_dir) as (daemon, _):
        for wait_s in (0.0, 0.5):
            with talking(daemon) as channel:
                started = time.monotonic()
                answer = converse(channel, daemon.hello(wait_s=wait_s)).message
                assert isinstance(answer, Refused)
                assert answer.code == "daemon_not_ready"
                assert time.monotonic() - started >= wait_s


def test_a_client_of_another_config_need_not_wait_for_the_load(model: Path, runtime_dir: Path) -> None:
    with held_at("start", model, runtime_dir) as (daemon, _), talking(daemon) as channel:
        daemon.wait_logged("config")
        answer = converse(channel, daemon.hello(layout="fused", dtype="float16")).message
        assert isinstance(answer, Refused)
        assert answer.code == "config_mismatch"
        fields = {field.name: (field.present, field.value) for field in answer.fields}
        assert fields == {"layout": (True, "hf"), "dtype": (True, "auto")}


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One ready daemon for the tests that only ask."""
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder,
        scripted_daemon(model, Path(folder) / "run", "--exchange-timeout", "2") as daemon,
    ):
        daemon.wait_until("ready")
        daemon.wait_logged("content digest")
        yield daemon


def refusal_of(daemon: Daemon, **changes: object) -> Refused:
    with talking(daemon) as channel:
        answer = converse(channel, daemon.hello(**changes)).message
        assert isinstance(answer, Refused), answer
        with pytest.raises(PeerClosed):  # a refusal ends the connection
            channel.receive(deadline=Deadline.after(30))
        return answer


def test_the_grant_describes_what_its_descriptors_are(served: Daemon) -> None:
    grant, fds = served.attach()
    with fds:
        assert len(fds) == 2
        host.verify(fds[0], nbytes=grant.manifest_nbytes, what="manifest")
        host.verify(fds[1], nbytes=grant.segments[0].nbytes, what="segment")
        for fd in (fds[0], fds[1]):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
    report = served.report()
    assert grant.generation == report.generation
    assert grant.version == report.version
    assert grant.version.startswith("digest:")
    assert grant.receipts_version.startswith("receipts:")
    assert grant.resident_nbytes == report.resident_nbytes == 4096
    assert grant.provenance.path == str(served.model_dir)


def test_two_clients_share_memory_but_no_file_offset(served: Daemon) -> None:
    _, first = served.attach()
    _, second = served.attach()
    with first, second:
        assert os.path.sameopenfile(first[1], second[1])
        os.lseek(first[1], 100, os.SEEK_SET)
        assert os.lseek(second[1], 0, os.SEEK_CUR) == 0


def test_the_nonce_is_the_runs_and_the_generation_stays(served: Daemon) -> None:
    first, fds = served.attach()
    fds.close()
    second, fds = served.attach()
    fds.close()
    assert (first.nonce, first.generation) == (second.nonce, second.generation)


def test_every_differing_field_is_named_with_our_value(served: Daemon) -> None:
    hello = served.hello()
    config = {**hello.config, "model.hidden_size": 31, "model.extra": [1, 2]}
    del config["model.vocab_size"]
    refused = refusal_of(served, config=config, fingerprint="0" * 64)
    assert refused.code == "config_mismatch"
    fields = {field.name: (field.present, field.value) for field in refused.fields}
    assert fields == {
        "model.hidden_size": (True, 32),
        "model.extra": (False, None),
        "model.vocab_size": (True, 100),
    }


def test_a_fingerprint_that_its_own_config_contradicts_is_a_broken_client(served: Daemon) -> None:
    assert refusal_of(served, fingerprint="0" * 64).code == "protocol"


def test_another_checkpoint_is_refused_by_digest(served: Daemon) -> None:
    assert refusal_of(served, receipts="1" * 64, digest="2" * 64).code == "content_mismatch"


def test_neither_receipts_nor_digest_is_refused(served: Daemon) -> None:
    assert refusal_of(served, receipts=None, receipts_trusted=False).code == "content_unproven"


def test_a_digest_alone_is_enough(served: Daemon) -> None:
    grant, fds = served.attach(receipts=None, receipts_trusted=False, digest=digest_of(served.model_dir))
    fds.close()
    assert grant.digest == digest_of(served.model_dir)


def test_another_view_of_the_files_proves_itself_once(served: Daemon) -> None:
    """A container's receipts differ (another mount); after one digest they are as good as ours."""
    foreign = {"receipts": "c" * 64, "receipts_trusted": True}
    with talking(served) as channel:
        unproven = converse(channel, served.hello(**foreign)).message
        assert isinstance(unproven, Unproven)
        assert unproven.rule
        frame = converse(channel, served.hello(**foreign, digest=digest_of(served.model_dir)))
        frame.fds.close()
        assert isinstance(frame.message, Grant)
    with talking(served) as channel:
        frame = converse(channel, served.hello(**foreign))
        frame.fds.close()
        assert isinstance(frame.message, Grant)


def test_want_names_a_version_or_whatever_is_current(served: Daemon) -> None:
    version = served.report().version
    assert version is not None
    for want in (version, "current"):
        grant, fds = served.attach(want=want, receipts=None, receipts_trusted=False)
        fds.close()
        assert grant.version == version
    refused = refusal_of(served, want="digest:" + "0" * 64)
    assert refused.code == "content_mismatch"
    assert refused.found == version


def test_the_connection_is_the_lease(served: Daemon) -> None:
    with talking(served) as channel:
        _, fds = served.attach(channel, name="engine under test")
        fds.close()
        lease = served.report().leases[-1]
        assert (lease.pid, lease.uid, lease.name) == (os.getpid(), os.geteuid(), "engine under test")
        pong = ask(channel, Ping(token=7))
        assert pong == Pong(token=7)
        report = ask(channel, Status())
        assert isinstance(report, Report)
        assert report.lease_count == 1
    served.wait_logged("lease ended", client="engine under test")
    assert served.report().lease_count == 0


def test_a_second_hello_on_a_lease_is_against_the_protocol(served: Daemon) -> None:
    with talking(served) as channel:
        _, fds = served.attach(channel)
        fds.close()
        refused = converse(channel, served.hello()).message
        assert isinstance(refused, Refused)
        assert refused.code == "protocol"
        with pytest.raises(PeerClosed):
            channel.receive(deadline=Deadline.after(30))


def test_a_lease_may_be_silent_longer_than_any_exchange(served: Daemon) -> None:
    """Exchanges have two seconds here; a lease has all the time it wants."""
    with talking(served) as lease, talking(served) as silent:
        _, fds = served.attach(lease)
        fds.close()
        refused = receive(silent)  # the event that shows that the two seconds are over: this one said nothing
        assert isinstance(refused, Refused)
        assert ask(lease, Ping(token=1)) == Pong(token=1)


def test_attaches_are_counted_by_outcome(served: Daemon) -> None:
    before = served.report().attaches
    _, fds = served.attach()
    fds.close()
    refusal_of(served, receipts="1" * 64, digest="2" * 64)
    after = served.report().attaches
    assert after["granted"] == before["granted"] + 1
    assert after["content_mismatch"] == before.get("content_mismatch", 0) + 1


def test_many_engines_at_once(served: Daemon) -> None:
    channels = [served.connect() for _ in range(50)]
    granted: list[OwnedFds] = []
    try:
        for channel in channels:
            channel.send(served.hello())
        for channel in channels:
            while not isinstance((frame := channel.receive(deadline=Deadline.after(30))).message, Grant):
                frame.fds.close()
            granted.append(frame.fds)
        assert served.report().lease_count == 50
    finally:
        for fds in granted:
            fds.close()
        for channel in channels:
            channel.close()


def test_a_digest_that_nobody_knows_yet_is_waited_for(model: Path, runtime_dir: Path) -> None:
    """Somebody else on this host is computing it: the daemon's process stands in line, the client is told so."""
    cache = DigestCache(runtime_dir.parent / "digests")
    with open_weights(weight_files(model)) as weights:
        receipts = take_receipts(weights)
    with ExitStack() as others_turn:
        shelf = others_turn.enter_context(cache.opened([]))
        others_turn.enter_context(shelf.turn(receipts.sha256))
        with scripted_daemon(model, runtime_dir, "--cache-dir", str(cache.directory)) as daemon:
            daemon.wait_until("ready")
            with talking(daemon) as channel:
                channel.send(daemon.hello(receipts=None, receipts_trusted=False, digest=digest_of(model)))
                loading = receive(channel)
                assert isinstance(loading, Loading)
                assert loading.stage == "digest"
                _, fds = daemon.attach()  # whom receipts are enough for need not wait
                fds.close()
                others_turn.close()
                while isinstance((frame := channel.receive(deadline=Deadline.after(30))).message, Loading):
                    frame.fds.close()
                frame.fds.close()
                assert isinstance(frame.message, Grant)
                assert frame.message.digest == digest_of(model)
                assert frame.message.version.startswith("digest:")


def test_a_daemon_that_cannot_compute_its_digest_says_so(runtime_dir: Path, tmp_path: Path) -> None:
    """Its files changed after the load: the digest process refuses to speak for what was loaded."""
    fresh = tiny_llama(tmp_path / "fresh")
    with scripted_daemon(fresh, runtime_dir, script={"receipts": False}) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("no content digest")
        with talking(daemon) as channel:
            assert isinstance(converse(channel, daemon.hello()).message, Unproven)
            refused = converse(channel, daemon.hello(digest=digest_of(fresh))).message
        assert isinstance(refused, Refused)
        assert refused.code == "content_unproven"
        assert "receipts" in str(refused.found)


def test_a_remembered_digest_is_there_from_the_start(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("content digest", source="computed", remembered=True)
    with scripted_daemon(model, runtime_dir) as daemon:
        report = daemon.wait_until("ready")
        assert report.digest == digest_of(model)


def test_connect_after_stop_finds_nothing(model: Path, runtime_dir: Path) -> None:
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
    with pytest.raises(FileNotFoundError):
        connect(daemon.place)
