"""The daemon under a real systemd: it is killed, restarted, stopped and starved, and engines go on."""

import signal
import statistics
from time import monotonic

import pytest

from tests.support.reports import samples, value
from tests.systemd.box import missing
from tests.systemd.services import Service, attach_in_box
from weightcached.daemon.install_units import PRESERVE_SINCE

pytestmark = [pytest.mark.root, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

KILLS = 20


def test_started_is_ready_and_the_vault_holds_the_weights(ranks: tuple[Service, Service]) -> None:
    box = ranks[0].box
    assert box.show("weightcached.target", "ActiveState") == "active"
    for service in ranks:
        report = service.report()
        assert (report.state, report.vault, report.tp_rank) == ("ready", "kept", service.tp_rank)
        assert service.show("StatusText").startswith("ready: ")
        assert service.show("NFileDescriptorStore") == "4"  # listener, state, one segment, its manifest
    output = box.run("ps", "-o", "user:20=", "-p", ranks[0].show("MainPID")).stdout
    assert output.strip() == "weightcached"


def test_a_client_loop_sees_no_error_across_twenty_kills(ranks: tuple[Service, Service]) -> None:
    service = ranks[0]
    before, hello, seconds = service.report(), service.hello(), []
    nonce = service.attach(hello).nonce
    with service.attach_loop() as loop:
        for _ in range(KILLS):
            killed_at = service.kill()
            grant = service.attach(hello, other_than=nonce)
            seconds.append(monotonic() - killed_at)
            nonce = grant.nonce
            assert grant.generation == before.generation
            loop.await_more(1)
    after = service.report()
    assert (after.generation, after.bytes_read, after.starts) == (before.generation, 0, before.starts + KILLS)
    assert {attach["source"] for attach in loop.done} == {"daemon"}
    assert {attach["generation"] for attach in loop.done} == {before.generation}
    longest = max(attach["seconds"] for attach in loop.done)
    print(
        f"kill to grant, {before.resident_nbytes / 2**30:.2f} GiB: median {statistics.median(seconds):.3f} s, "
        f"longest {max(seconds):.3f} s; {len(loop.done)} attaches, longest {longest:.3f} s"
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGSEGV])
def test_an_end_that_was_not_meant_is_followed_by_a_start(number: int, ranks: tuple[Service, Service]) -> None:
    """SIGHUP too, which systemd takes for a clean end."""
    service = ranks[0]
    before, hello = service.report(), service.hello()
    nonce = service.attach(hello).nonce
    service.kill(number)
    assert service.attach(hello, other_than=nonce).generation == before.generation


def test_a_restart_keeps_the_weights(ranks: tuple[Service, Service]) -> None:
    service = ranks[0]
    before = service.report()
    service.box.run("systemctl", "daemon-reexec")  # as an upgrade of systemd does
    service.systemctl("restart")
    after = service.report()
    assert after.pid != before.pid
    assert (after.generation, after.bytes_read) == (before.generation, 0)


def test_a_stopped_rank_refuses_loudly_and_others_go_on(ranks: tuple[Service, Service]) -> None:
    stopped, other = ranks
    before, untouched = stopped.report(), other.report()
    stopped.systemctl("stop")
    assert stopped.show("ActiveState") == "inactive"
    assert stopped.place.socket_path.is_socket()
    with pytest.raises(ConnectionRefusedError):
        stopped.report()
    answer = attach_in_box(stopped)
    assert answer.startswith("DaemonUnreachable: ")
    assert other.report().pid == untouched.pid
    assert attach_in_box(other) == f"daemon {untouched.generation}"
    stopped.systemctl("start")
    after = stopped.report()
    assert (after.state, after.vault) == ("ready", "kept")
    kept = stopped.box.systemd_version >= PRESERVE_SINCE
    assert (after.generation == before.generation) == kept
    assert (after.bytes_read == 0) == kept
    assert attach_in_box(stopped) == f"daemon {after.generation}"


def test_a_keeper_that_hangs_is_replaced(ranks: tuple[Service, Service]) -> None:
    service = ranks[1]
    before, hello = service.report(), service.hello()
    with service.overridden("WatchdogSec=2"):
        service.systemctl("restart")
        nonce = service.attach(hello).nonce
        pid = service.box.main_pid(service.unit)
        stopped_at = service.kill(signal.SIGSTOP)
        service.await_death(pid)
        noticed = monotonic() - stopped_at
        grant = service.attach(hello, other_than=nonce)
    assert grant.generation == before.generation
    assert "Watchdog timeout" in service.box.log(service.unit)
    print(f"stopped keeper killed after {noticed:.2f} s (WatchdogSec=2)")
    service.systemctl("restart")  # with the interval of the unit again


def test_the_limit_of_the_service_does_not_follow_the_weights_and_that_of_the_slice_does(
    ranks: tuple[Service, Service],
) -> None:
    """Why the documentation says where MemoryMax= belongs: pages stay charged to the group that they were made in."""
    service = ranks[0]
    hello = service.hello()
    nonce = service.attach(hello).nonce

    def groups() -> tuple[int, int]:
        group = service.box.path("/sys/fs/cgroup" + service.show("ControlGroup"))
        return group.stat().st_ino, group.parent.stat().st_ino

    own, slice_ = groups()
    service.kill()
    service.attach(hello, other_than=nonce)
    own_again, slice_again = groups()
    assert own_again != own
    assert slice_again == slice_


DEPENDENCIES = {"wants": "Wants", "requires": "Requires", "binds": "BindsTo"}


def test_an_engine_that_only_wants_the_keeper_is_not_restarted_with_it(ranks: tuple[Service, Service]) -> None:
    """And why the example says so: the same engine with a stronger dependency is."""
    service, _ = ranks
    box, example = service.box, "weightcached-engine-example.service"
    waiting = [line for line in box.run("systemctl", "cat", example).stdout.splitlines() if "ExecStartPre=" in line]
    # The example as it is, for two ranks, and instead of an engine something that takes less time to start.
    lines = [
        "ExecStartPre=",
        waiting[0].replace("--tp-size 1", "--tp-size 2"),
        "ExecStart=",
        "ExecStart=sleep infinity",
    ]
    box.write(f"/run/systemd/system/{example}.d/sleep.conf", "\n".join(["[Service]", *lines]))
    engines = {example: example}
    for name, dependency in DEPENDENCIES.items():
        engines[name] = f"engine-{name}.service"
        text = f"[Unit]\n{dependency}={service.unit}\nAfter={service.unit}\n[Service]\nExecStart=sleep infinity\n"
        box.write(f"/run/systemd/system/{engines[name]}", text)
    box.run("systemctl", "daemon-reload")

    def processes() -> dict[str, str]:
        return {name: box.show(unit, "MainPID") for name, unit in engines.items()}

    box.run("systemctl", "start", *engines.values())
    try:
        hello = service.hello()
        nonce = service.attach(hello).nonce
        first = processes()
        assert "0" not in first.values()
        service.kill()
        service.attach(hello, other_than=nonce)
        service.systemctl("restart")
        second = processes()
        assert {name for name in engines if second[name] == first[name]} == {example, "wants"}
        service.systemctl("stop")
        assert {name for name, pid in processes().items() if pid != "0"} == {example, "wants"}
    finally:
        box.run("systemctl", "stop", *engines.values())


def test_the_exporter_sees_every_rank_and_goes_on_when_one_dies(ranks: tuple[Service, Service]) -> None:
    box, unit = ranks[0].box, "weightcached-exporter.service"
    try:
        with box.started("journalctl", "-f", "-n", "all", "-o", "cat", "-u", unit) as journal:
            box.run("systemctl", "start", unit)
            journal.log.wait_for(lambda line: "listening" in line)

        def ask(path: str) -> str:
            code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9410{path}').read().decode())"
            return box.run("python", "-c", code).stdout

        ready = {f"{service.place}: ready" for service in ranks}  # other tests have places there, too
        assert ready <= set(ask("/readyz").splitlines())
        metrics = samples(ask("/metrics"))
        assert [value(metrics, "up", place=str(service.place)) for service in ranks] == [1, 1]
        hello = ranks[0].hello()
        nonce = ranks[0].attach(hello).nonce
        ranks[0].kill()
        ranks[0].attach(hello, other_than=nonce)
        assert ready <= set(ask("/readyz").splitlines())
        assert box.run("ps", "-o", "user:20=", "-p", box.show(unit, "MainPID")).stdout.strip() == "weightcached"
    finally:
        box.run("systemctl", "stop", unit)
