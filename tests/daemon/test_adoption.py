"""A keeper that is started again and handed what the one before it left: adopted, or refused with the reason.

A stand-in for systemd keeps the descriptors (`tests/support/manager.py`), and lets them be tampered with in between.
"""

import errno
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import settled
from tests.support.daemons import TIMEOUT_S, Daemon, arguments_for, connect, converse, digest_of
from tests.support.manager import Manager
from tests.support.resources import anonymous_nbytes, open_fds
from tests.support.unprivileged import ROOT
from weightcached.daemon.state_record import NBYTES as STATE_NBYTES
from weightcached.daemon.state_record import StateFile, StateRecord
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.manifest import Manifest, NameAccounting, encode_manifest
from weightcached.protocol.memory import host, names
from weightcached.protocol.messages import Event, Grant, Ping, Pong, Refused, Report, Unproven

MIB = 1 << 20


class Lives:
    """The lives of one place's keeper, one after the other, under one manager."""

    def __init__(self, manager: Manager, model: Path, runtime_dir: Path) -> None:
        self.manager = manager
        self.model = model
        self.runtime_dir = runtime_dir
        self.daemons: list[Daemon] = []

    def start(self, *extra: str, model: Path | None = None, **options: Any) -> Daemon:
        started = self.manager.start(model or self.model, self.runtime_dir, *extra, **options)
        self.daemons.append(started)
        return started

    def ready(self, *extra: str, **options: Any) -> tuple[Daemon, Report]:
        started = self.start(*extra, **options)
        return started, started.wait_until("ready")

    def kill(self) -> None:
        self.daemons[-1].stop(signal.SIGKILL)

    @property
    def generations(self) -> set[str]:
        """Of which anything is kept."""
        return {name[1:33] for name in self.manager.names if name.startswith("g")}

    def state(self) -> StateRecord:
        """What is in the state that is kept."""
        state = StateFile.open(os.dup(self.manager.fd("state")))
        state.close()
        return state.record


@pytest.fixture
def under(model: Path, runtime_dir: Path) -> Iterator[Callable[..., Lives]]:
    """Makes lives, under a manager of one's own; nothing of them is left in the end."""
    with ExitStack() as ending:

        def make(checkpoint: Path | None = None, **options: Any) -> Lives:
            manager = ending.enter_context(Manager(runtime_dir.parent, **options))
            lives = Lives(manager, checkpoint or model, runtime_dir)
            ending.callback(lambda: [one.stop(signal.SIGKILL) for one in lives.daemons])
            return lives

        yield make


@pytest.fixture
def lives(under: Callable[..., Lives]) -> Lives:
    return under()


def copy_of(model: Path, to: Path) -> Path:
    """The same checkpoint somewhere else: same bytes, other files."""
    return Path(shutil.copytree(model, to))


def listening() -> set[str]:
    """Every listening Unix socket, as `open_fds` shows it."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f"socket:[{row[6]}]" for row in rows if int(row[3], 16) & 0x10000}


def closes_on_exec(pid: int, fd: int) -> bool:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines())
    return bool(int(fields["flags"], 8) & os.O_CLOEXEC)


def loaded_anew(report: Report, before: Report) -> bool:
    return report.generation != before.generation and report.bytes_read > 0 and report.adoption_seconds is None


def adopted(report: Report, before: Report) -> bool:
    return (
        (report.generation, report.version, report.resident_nbytes)
        == (before.generation, before.version, before.resident_nbytes)
        and report.bytes_read == 0
        and report.adoption_seconds is not None
    )


# The plain case


def test_what_was_kept_is_served_again_without_reading_a_weight(lives: Lives) -> None:
    first, before = lives.ready()
    assert (before.vault, before.starts, before.adoptions, before.proven) == ("kept", 1, 0, True)
    first.wait_logged("content digest")
    before = first.report()
    inode = os.lstat(first.place.socket_path).st_ino
    for start in (2, 3):
        lives.kill()
        daemon, report = lives.ready()
        assert adopted(report, before)
        assert (report.vault, report.starts, report.adoptions) == ("kept", start, start - 1)
        assert os.lstat(first.place.socket_path).st_ino == inode
        assert "start worker" not in [record.get("stage") for record in daemon.log.records()]
        daemon.wait_logged("proven again", verdict="proven")
        assert daemon.report().proven
        grant, fds = daemon.attach()
        with fds:
            assert (grant.generation, grant.digest) == (before.generation, digest_of(lives.model))
            assert os.pread(fds[1], 1, 0) == b"\1"
        assert lives.state().adoption_attempts == 0
        assert anonymous_nbytes(daemon.pid) < 64 * MIB


def test_its_children_inherit_nothing_of_it(lives: Lives) -> None:
    first, _ = lives.ready()
    first.wait_logged("content digest")
    lives.kill()
    daemon = lives.start("--dtype", "float32", script={"hang_at": "planned"})  # refused, and a worker started
    daemon.wait_logged("planned")
    assert listening() & set(open_fds(daemon.pid).values())
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    assert children
    for child in children:
        kinds = [what.split(":")[0] for fd, what in open_fds(child).items() if fd > 2]
        assert set(kinds) <= {"socket", "/dev/null"}, open_fds(child)
        assert not listening() & set(open_fds(child).values())
        environment = Path(f"/proc/{child}/environ").read_bytes()
        assert b"LISTEN_" not in environment
        assert b"NOTIFY_SOCKET" not in environment
    inheritable = [what for fd, what in open_fds(daemon.pid).items() if fd > 2 and not closes_on_exec(daemon.pid, fd)]
    assert inheritable == []


def test_names_and_order_in_the_vault_do_not_matter(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    fds = [os.dup(lives.manager.fd(name)) for name in lives.manager.names]
    for name in lives.manager.names:
        lives.manager.remove(name)
    random.Random(4).shuffle(fds)
    for fd in fds:
        lives.manager.add("stored", fd)
    _, report = lives.ready()
    assert adopted(report, before)


def test_clients_wait_in_the_backlog_of_a_dead_keeper(lives: Lives) -> None:
    first, before = lives.ready()
    lives.kill()
    channel = connect(first.place)
    try:
        channel.send(Ping(token=7))
        daemon, report = lives.ready()
        assert adopted(report, before)
        assert channel.receive().message.model_dump() == {"token": 7}
        daemon.report()
    finally:
        channel.close()


# Torn sets


def wrong_size(lives: Lives, generation: str) -> None:
    fd = host.allocate(4097, name=names.segment_name(generation, 0))
    host.seal(fd)
    lives.manager.replace(f"g{generation}.s0", fd)


def unsealed(lives: Lives, generation: str) -> None:
    lives.manager.replace(f"g{generation}.s0", host.allocate(4096, name=names.segment_name(generation, 0)))


def another_file(lives: Lives, generation: str) -> None:
    path = lives.runtime_dir.parent / "file"
    path.write_bytes(bytes(4096))
    lives.manager.replace(f"g{generation}.s0", os.open(path, os.O_RDONLY))


def two_segments(lives: Lives, generation: str) -> None:
    fd = host.allocate(4096, name=names.segment_name(generation, 0))
    host.seal(fd)
    lives.manager.add(f"g{generation}.s0", fd)


def manifest_with(lives: Lives, generation: str, change: Callable[[bytes], bytes], *, seal: bool = True) -> None:
    name = f"g{generation}.m"
    old = lives.manager.fd(name)
    data = change(os.pread(old, os.fstat(old).st_size, 0))
    fd = host.allocate(len(data), name=names.manifest_name(generation))
    os.pwrite(fd, data, 0)
    if seal:
        host.seal(fd)
    lives.manager.replace(name, fd)


def changed_manifest(lives: Lives, generation: str) -> None:
    manifest_with(lives, generation, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def unsealed_manifest(lives: Lives, generation: str) -> None:
    manifest_with(lives, generation, lambda data: data, seal=False)


def manifest_of_another(lives: Lives, generation: str) -> None:
    forget_the_record(lives)

    def other(data: bytes) -> bytes:
        manifest = Manifest.decode(data)
        meta = manifest.meta.model_copy(update={"generation": "0" * 32})
        return encode_manifest(meta, list(manifest), NameAccounting())

    manifest_with(lives, generation, other)


def no_manifest(lives: Lives, generation: str) -> None:
    lives.manager.remove(f"g{generation}.m")


def no_segment(lives: Lives, generation: str) -> None:
    lives.manager.remove(f"g{generation}.s0")


def not_a_manifest(lives: Lives, generation: str) -> None:
    forget_the_record(lives)
    manifest_with(lives, generation, lambda data: b"\xc1" * 100)


def forget_the_record(lives: Lives) -> None:
    os.pwrite(lives.manager.fd("state"), bytes(STATE_NBYTES), 0)


@pytest.mark.parametrize(
    ("tear", "words"),
    [
        (no_manifest, "1 segments came without the manifest"),
        (no_segment, "not all segments came"),
        (wrong_size, "segment 0 has another size"),
        (unsealed, "segment 0 lacks seals"),
        (another_file, "segment 0 cannot be sealed"),
        (two_segments, "segment 0 came twice"),
        (changed_manifest, "the manifest is not the one that was published"),
        (unsealed_manifest, "the manifest lacks seals"),
        (manifest_of_another, "the manifest is another generation's"),
        (not_a_manifest, "bad manifest"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_torn_set_is_refused_with_the_reason_and_loaded_anew(
    lives: Lives, tear: Callable[[Lives, str], None], words: str
) -> None:
    _, before = lives.ready()
    lives.kill()
    tear(lives, str(before.generation))
    daemon, report = lives.ready()
    assert loaded_anew(report, before)
    assert words in str(report.last_error)
    assert str(report.last_error).startswith("transfer:")
    assert lives.generations == {report.generation}
    assert (report.vault, report.generations) == ("kept", 1)
    memory = [what for what in open_fds(daemon.pid).values() if str(before.generation) in what]
    assert memory == [], "the memory of what was refused is held"


def test_strangers_are_put_out_and_do_not_matter(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    reading, writing = os.pipe()
    os.close(writing)
    lives.manager.add("pipe", reading)
    lives.manager.add("file", os.open(__file__, os.O_RDONLY))
    lives.manager.add("memfd", os.memfd_create("weightcached:0123:0"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        lives.manager.add("g.s0", os.dup(datagrams.fileno()))
    lives.manager.add(lives.manager.named(".m"), os.open(os.devnull, os.O_RDONLY))  # with a name that is ours
    _, report = lives.ready()
    assert adopted(report, before)
    assert sorted(set(lives.manager.names)) == sorted(
        ["listener", "state", f"g{before.generation}.m", f"g{before.generation}.s0"]
    )


# The state


@pytest.mark.parametrize("lost", ["destroyed", "missing", "foreign"])
def test_without_its_record_a_whole_generation_is_adopted_unproven(lives: Lives, lost: str) -> None:
    first, _ = lives.ready()
    first.wait_logged("content digest")
    before = first.report()
    lives.kill()
    if lost == "destroyed":
        forget_the_record(lives)
    else:
        lives.manager.remove("state")
        if lost == "foreign":
            lives.manager.add("state", os.memfd_create("weightcached:state"))
    daemon, report = lives.ready()
    assert (report.generation, report.bytes_read) == (before.generation, 0)
    assert not report.proven
    daemon.wait_logged("proven again", verdict="undecidable")  # no digest was known when its manifest was written
    assert "no content digest of the weights was known" in str(daemon.report().unproven_reason)
    assert lives.manager.names.count("state") == 1
    assert lives.state().current == before.generation
    channel = daemon.connect()
    try:
        assert isinstance(converse(channel, daemon.hello()).message, Unproven)
    finally:
        channel.close()
    grant, fds = daemon.attach(want="current")
    fds.close()
    assert grant.receipts_version.startswith("receipts:")


def test_with_the_digest_in_its_manifest_it_is_proven_even_then(lives: Lives) -> None:
    first, _ = lives.ready()
    first.wait_logged("content digest")
    assert first.stop() == 0
    lives.manager.remove(lives.manager.named(".m"))
    second, before = lives.ready()  # loaded again, with a digest that is remembered
    assert before.digest is not None
    lives.kill()
    forget_the_record(lives)
    daemon, report = lives.ready()
    assert adopted(report, before)
    daemon.wait_logged("proven again", verdict="proven")
    assert daemon.report().proven
    assert second.pid != daemon.pid


@pytest.mark.parametrize("slot", ["newer", "older"])
def test_one_slot_destroyed_costs_nothing_of_the_weights(lives: Lives, slot: str) -> None:
    _, before = lives.ready()
    lives.kill()
    fd = lives.manager.fd("state")
    state = StateFile.open(os.dup(fd))
    newer = state.sequence % 2
    state.close()
    os.pwrite(fd, b"\xff" * 4096, (newer if slot == "newer" else 1 - newer) * STATE_NBYTES // 2)
    _, report = lives.ready()
    assert (report.generation, report.bytes_read) == (before.generation, 0)


# What was asked for


def test_another_config_is_refused_by_field_and_replaced(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    release = lives.runtime_dir.parent / "release"
    os.mkfifo(release)
    daemon = lives.start("--dtype", "float32", script={"hang_at": "progress", "release": str(release)})
    daemon.wait_logged("progress", stage="read")
    assert lives.generations == {before.generation}  # until there is something better
    waiting = daemon.report()
    assert "dtype: kept 'auto', asked for 'float32'" in str(waiting.last_error)
    assert (waiting.state, waiting.generations) == ("loading", 1)
    os.close(os.open(release, os.O_WRONLY))
    report = daemon.wait_until("ready")
    assert loaded_anew(report, before)
    assert report.generations == 1
    daemon.wait_logged("state", state="ready")
    assert lives.generations == {report.generation}
    assert lives.state().current == report.generation


def test_options_tell_apart_even_without_a_config_file(lives: Lives, tmp_path: Path) -> None:
    lives.model = copy_of(lives.model, tmp_path / "copy")
    _, before = lives.ready()
    lives.kill()
    (lives.model / "config.json").rename(tmp_path / "config.json")
    daemon = lives.start("--layout", "fused")
    report = daemon.wait_until("failed")  # nothing can be loaded there
    assert "bad_model_config" in str(report.last_error)
    daemon.wait_logged("not adopted", generation=before.generation, code="configuration")
    assert lives.generations == {before.generation}
    lives.kill()
    _, report = lives.ready()  # and with the options as they were it is there again
    assert adopted(report, before)


def vanished(model: Path, aside: Path) -> None:
    model.rename(aside)


def without_config(model: Path, aside: Path) -> None:
    (model / "config.json").rename(aside)


def hanging_config(model: Path, aside: Path) -> None:
    (model / "config.json").rename(aside)
    os.mkfifo(model / "config.json")  # to open it is to wait for ever, as on a dead network mount


def broken_config(model: Path, aside: Path) -> None:
    (model / "config.json").rename(aside)
    (model / "config.json").write_text("{")


def truncated_away(model: Path, aside: Path) -> None:
    (model / "model.safetensors").rename(aside)


@pytest.mark.parametrize(
    ("lose", "back"),
    [
        (vanished, ""),
        (without_config, "config.json"),
        (hanging_config, "config.json"),
        (broken_config, "config.json"),
        (truncated_away, "model.safetensors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_checkpoint_that_cannot_be_read_costs_no_weights(
    lives: Lives, tmp_path: Path, lose: Callable[[Path, Path], None], back: str
) -> None:
    lives.model = copy_of(lives.model, tmp_path / "copy")
    first, _ = lives.ready()
    first.wait_logged("content digest")
    hello = first.hello()
    before = first.report()
    lives.kill()
    lose(lives.model, tmp_path / "aside")
    daemon, report = lives.ready()
    assert adopted(report, before)
    assert (report.proven, report.vault) == (False, "kept")
    assert report.unproven_reason
    channel = daemon.connect()
    try:  # an engine that knows the digest is served meanwhile
        frame = converse(channel, hello.model_copy(update={"digest": before.digest}))
        frame.fds.close()
        assert isinstance(frame.message, Grant)
    finally:
        channel.close()
    if back != "config.json":
        daemon.wait_logged("not proven again yet")
    if back:
        (lives.model / back).unlink(missing_ok=True)
    (tmp_path / "aside").rename(lives.model / back if back else lives.model)
    daemon.wait_logged("proven again", verdict="proven")  # when it is back
    assert daemon.report().proven


def test_a_checkpoint_that_was_stamped_again_is_proven_by_its_content(lives: Lives, tmp_path: Path) -> None:
    lives.model = settled(copy_of(lives.model, tmp_path / "copy"))
    first, _ = lives.ready()
    first.wait_logged("content digest")
    before = first.report()
    lives.kill()
    (lives.model / "model.safetensors").chmod(0o640)
    settled(lives.model)
    daemon, report = lives.ready()
    assert adopted(report, before)
    daemon.wait_logged("proven again", verdict="proven")
    assert daemon.report().proven
    channel = daemon.connect()
    try:  # and from then on by the new receipts alone
        frame = converse(channel, daemon.hello())
        frame.fds.close()
        assert isinstance(frame.message, Grant)
    finally:
        channel.close()


def test_a_checkpoint_that_was_replaced_costs_no_weights_and_is_said_loudly(lives: Lives, tmp_path: Path) -> None:
    lives.model = copy_of(lives.model, tmp_path / "copy")
    first, _ = lives.ready()
    first.wait_logged("content digest")
    before = first.report()
    lives.kill()
    with open(lives.model / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    daemon = lives.start()
    daemon.wait_logged("state", state="ready")
    lease = daemon.connect()
    try:
        grant, fds = daemon.attach(lease, want="current")
        fds.close()
        assert grant.generation == before.generation
        daemon.wait_logged("proven again", verdict="contradicted")
        report = daemon.report()
        assert adopted(report, before)
        assert not report.proven
        assert str(report.last_error).startswith("content_mismatch:")
        assert "weightcached release" in str(report.last_error)
        channel = daemon.connect()
        try:
            refused = converse(channel, daemon.hello(digest=digest_of(lives.model))).message
        finally:
            channel.close()
        assert isinstance(refused, Refused)
        assert refused.code == "content_mismatch"
        event = lease.receive().message
        assert isinstance(event, Event)
        assert (event.kind, event.generation) == ("failed", before.generation)
    finally:
        lease.close()


def test_the_same_content_at_another_path_is_proven_before_it_is_served(lives: Lives, tmp_path: Path) -> None:
    first, _ = lives.ready()
    first.wait_logged("content digest")
    before = first.report()
    lives.kill()
    copy = settled(copy_of(lives.model, tmp_path / "copy"))
    daemon, report = lives.ready(model=copy)
    assert adopted(report, before)
    assert report.proven
    daemon.wait_logged("progress", stage="prove")
    channel = daemon.connect()
    try:  # an engine that sees that path needs no digest
        frame = converse(channel, daemon.hello())
        frame.fds.close()
        assert isinstance(frame.message, Grant)
        assert frame.message.provenance.path == str(copy.resolve())
    finally:
        channel.close()
    lives.kill()
    again, report = lives.ready(model=copy)  # from now on they are from there
    assert adopted(report, before)
    assert "prove" not in [record.get("stage") for record in again.log.records()]


def test_other_content_at_another_path_is_loaded_and_replaces_what_was_kept(lives: Lives, tmp_path: Path) -> None:
    first, _ = lives.ready()
    first.wait_logged("content digest")
    before = first.report()
    lives.kill()
    other = copy_of(lives.model, tmp_path / "other")
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    daemon, report = lives.ready(model=other)
    assert loaded_anew(report, before)
    assert str(report.last_error).startswith("content_mismatch:")
    daemon.wait_logged("progress", stage="prove")
    assert lives.generations == {report.generation}


# Attempts


def test_the_third_failure_quarantines_and_serves_anew(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    for attempt in (1, 2, 3):
        daemon = lives.start("--verify-on-adopt")
        daemon.wait_logged("state", state="adopting")
        lives.kill()
        assert lives.state().adoption_attempts == attempt
        assert lives.generations == {before.generation}, "a keeper that crashes while adopting loses the vault"
    daemon, report = lives.ready("--verify-on-adopt")
    daemon.wait_logged("quarantined: adoption failed too often")
    assert loaded_anew(report, before)
    assert report.quarantined == (before.generation,)
    assert report.quarantined_nbytes > 4096
    assert report.unexplained_nbytes == report.quarantined_nbytes
    assert report.generations == 2
    assert lives.generations == {before.generation, report.generation}
    assert [what for what in open_fds(daemon.pid).values() if str(before.generation) in what] == []
    lives.kill()
    again, after = lives.ready()  # it stays out of the way
    assert adopted(after, report)
    assert after.quarantined == (before.generation,)
    command = [sys.executable, "-m", "weightcached.daemon", "release", "--runtime-dir", str(lives.runtime_dir)]
    released = subprocess.run([*command, "--quarantined"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert released.returncode == 0
    assert "gave up 1 generation," in released.stdout
    assert lives.generations == {report.generation}
    assert again.report().quarantined == ()
    assert lives.state().quarantined == ()


def test_success_and_a_stop_forgive_earlier_failures(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    for _ in range(2):
        lives.start("--verify-on-adopt").wait_logged("state", state="adopting")
        lives.kill()
    daemon = lives.start("--verify-on-adopt")
    daemon.wait_logged("state", state="adopting")
    assert daemon.stop() == 0  # in the middle of it, on purpose
    assert lives.state().adoption_attempts == 0
    _, report = lives.ready("--verify-on-adopt")
    assert adopted(report, before)
    assert lives.state().adoption_attempts == 0


def test_resident_bytes_that_changed_are_found_by_verifying(lives: Lives) -> None:
    _, before = lives.ready()
    lives.kill()
    _, report = lives.ready("--verify-on-adopt")
    assert adopted(report, before)
    lives.kill()
    generation = str(before.generation)
    fd = host.allocate(4096, name=names.segment_name(generation, 0))
    os.pwrite(fd, b"\1\0\0\1", 0)
    host.seal(fd)
    lives.manager.replace(f"g{generation}.s0", fd)
    _, report = lives.ready("--verify-on-adopt")
    assert loaded_anew(report, before)
    assert "1 that differ: weight" in str(report.last_error)
    assert lives.generations == {report.generation}


def test_an_error_of_ours_leaves_everything_to_the_next_keeper(lives: Lives) -> None:
    first, before = lives.ready()
    lives.kill()
    kept = lives.manager.names
    waiting = connect(first.place)
    try:
        waiting.send(Ping(token=3))
        for attempt in (1, 2):
            broken = lives.start(environment={"WEIGHTCACHED_TEST_BREAKS": "examine"})
            assert broken.process.wait(TIMEOUT_S) == 70
            assert lives.manager.names == kept
            assert lives.state().adoption_attempts == attempt
            assert first.place.socket_path.exists()
        _, report = lives.ready()
        assert adopted(report, before)
        # Whom the broken ones had not accepted was left to the last.
        with suppress(PeerClosed):
            assert isinstance(waiting.receive().message, Pong | Refused)
        assert refused_connection(first) is False
    finally:
        waiting.close()


# Killed on the way


@pytest.mark.parametrize("name", ["state", "listener", ".s0", ".m"])
def test_killed_while_it_stores(lives: Lives, name: str) -> None:
    """Whatever was stored last, the next keeper serves: what is whole is adopted, what is not is loaded."""
    lives.manager.kill_when_stored = lambda stored: stored.endswith(name)
    first = lives.start()
    assert first.process.wait(TIMEOUT_S) == -signal.SIGKILL
    lives.manager.kill_when_stored = lambda stored: False
    daemon, report = lives.ready()
    whole = any(handed.endswith(".m") for handed in lives.manager.handed)  # more may have been on its way
    assert whole or name != ".m"
    assert (report.bytes_read == 0) == whole
    assert lives.generations == {report.generation}
    if whole:
        assert not report.proven
        daemon.wait_logged("proven again")


# Stopped and started again


def refused_connection(daemon: Daemon) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(daemon.place.socket_path)) == errno.ECONNREFUSED


def test_a_stop_leaves_the_file_and_the_weights(lives: Lives) -> None:
    first, before = lives.ready()
    assert first.stop() == 0
    assert refused_connection(first)
    assert "listener" not in lives.manager.names
    assert lives.generations == {before.generation}
    assert any(said.stopping for said in lives.manager.said)
    daemon, report = lives.ready()
    assert adopted(report, before)
    assert sorted(lives.manager.names) == sorted(
        ["listener", "state", f"g{before.generation}.m", f"g{before.generation}.s0"]
    )
    assert daemon.report().starts == 2


def test_a_stop_with_nothing_to_keep_leaves_nothing(lives: Lives) -> None:
    failing = lives.start(script={"fail_at": "job", "fail": {"code": "checkpoint", "message": "no"}})
    failing.wait_until("failed")
    assert failing.stop() == 0
    assert not failing.place.socket_path.exists()
    assert lives.manager.names == []


def test_the_manager_is_told(lives: Lives) -> None:
    daemon, _ = lives.ready()
    lives.manager.wait_said(lambda said: said.ready and (said.status or "").startswith("ready: 4.0 KiB"))
    before = list(itertools.takewhile(lambda said: not said.ready, lives.manager.said))
    states = {said.status.partition(":")[0] for said in before if said.status is not None}
    assert states
    assert states <= {"starting", "loading"}
    daemon.stop()
    lives.manager.wait_said(lambda said: said.stopping and (said.status or "").startswith("draining"))


def test_signs_of_life_are_given_from_the_start(lives: Lives) -> None:
    lives.start(environment={"WATCHDOG_USEC": "200000"}, script={"hang_at": "progress"})
    lives.manager.wait_said(lambda said: said.alive)
    alive = sum(said.alive for said in lives.manager.said)
    lives.manager.wait_said(lambda said: sum(one.alive for one in lives.manager.said) >= alive + 3)


def test_a_failure_is_told_as_ready_with_the_reason(lives: Lives) -> None:
    lives.start(script={"fail_at": "job", "fail": {"code": "checkpoint", "message": "no such luck"}})
    said = lives.manager.wait_said(lambda said: said.ready)
    assert str(said.status).startswith("failed: no such luck")


# What is kept, and what is not


def test_a_store_that_is_too_small_is_noticed(under: Callable[..., Lives]) -> None:
    lives = under(store_max=3)
    daemon, report = lives.ready()
    assert report.vault == "dropped"
    assert "systemd keeps at most 3 of 4 descriptors" in str(report.vault_reason)
    assert sorted(lives.manager.names) == ["listener", "state"], "half a generation is kept"
    daemon.attach()[1].close()  # served all the same
    lives.kill()
    _, again = lives.ready()
    assert loaded_anew(again, report)
    assert again.last_error is None


def test_room_for_one_generation_is_enough_to_replace_it(under: Callable[..., Lives]) -> None:
    lives = under(store_max=4)
    _, before = lives.ready()
    assert before.vault == "kept"
    lives.kill()
    _, report = lives.ready("--dtype", "float32")
    assert loaded_anew(report, before)
    assert report.vault == "kept"
    assert lives.generations == {report.generation}


def test_a_manager_that_says_nothing_leaves_it_unproven(under: Callable[..., Lives]) -> None:
    lives = under(silent=True)
    daemon, report = lives.ready()
    assert report.vault == "unproven"
    assert "WEIGHTCACHED_UNIT" in str(report.vault_reason)
    assert lives.generations == {report.generation}
    assert daemon.stop() == 0
    assert refused_connection(daemon), "the weights may still be kept"


@pytest.mark.parametrize(("keeps", "vault"), [("4", "kept"), ("3", "dropped"), ("", "unproven")])
def test_systemctl_is_asked_where_the_unit_is_known(
    under: Callable[..., Lives], tmp_path: Path, keeps: str, vault: str
) -> None:
    lives = under(silent=True)
    asked = tmp_path / "systemctl"
    asked.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho {keeps}\n')
    asked.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WEIGHTCACHED_UNIT": "weightcached@0.service"}
    _, report = lives.ready(environment=environment)
    assert report.vault == vault
    assert "NFileDescriptorStore" in (tmp_path / "asked").read_text()
    assert "weightcached@0.service" in (tmp_path / "asked").read_text()


def test_descriptors_meant_for_another_process_are_no_start(model: Path, runtime_dir: Path) -> None:
    ended = subprocess.run(
        [
            "sh",
            "-c",
            '"$@"; exit $?',
            "sh",
            sys.executable,
            "-m",
            "weightcached.daemon",
            *arguments_for(model, runtime_dir),
        ],
        env={**os.environ, "LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "state"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 1
    assert "not meant for this process" in ended.stderr
    assert "sh -c" in ended.stderr
    assert not runtime_dir.exists()
