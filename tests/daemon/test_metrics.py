"""Metrics: every figure of a report under its name, in a form that Prometheus reads; memory that no daemon holds."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.reports import READY, samples, value
from tests.support.unprivileged import NOBODY, command_as
from weightcached.daemon.address import Address
from weightcached.daemon.durations import DurationCounts
from weightcached.daemon.mapped import Mapped, unexplained
from weightcached.daemon.metrics import render
from weightcached.daemon.seen import Seen
from weightcached.daemon.states import State
from weightcached.protocol.errors import DaemonUnreachable, InvalidOption
from weightcached.protocol.memory import host, names
from weightcached.protocol.messages import Durations, Report
from weightcached.protocol.places import Place

PLACE = Place(Path("/run/weightcached"), "default", "host-tp0of1")
OTHER = Place(Path("/run/weightcached"), "default", "host-tp1of2")


def metrics_of(report: Report = READY, **changes: object) -> dict:
    return samples(render([Seen(PLACE, report=report.model_copy(update=changes))]).decode())


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("up", {}, 1),
        ("ready", {}, 1),
        ("resident_bytes", {}, 1 << 30),
        ("own_memory_bytes", {}, 25 << 20),
        ("generations", {}, 2),
        ("quarantined_generations", {}, 1),
        ("quarantined_bytes", {}, 1 << 20),
        ("unexplained_bytes", {}, 1 << 20),
        ("held_bytes", {"standing": "current"}, 1 << 30),
        ("held_bytes", {"standing": "previous"}, 5 << 20),
        ("held_bytes", {"standing": "prepared"}, 0),
        ("held_leases", {"standing": "previous"}, 2),
        ("connections", {}, 8),
        ("leases", {"state": "connected"}, 3),
        ("leases", {"state": "detached"}, 2),
        ("heartbeat_age_seconds", {}, 4),
        ("proven", {}, 1),
        ("vault", {"state": "kept"}, 1),
        ("vault", {"state": "dropped"}, 0),
        ("adoption_attempts", {}, 1),
        ("adoption_seconds", {}, 0.25),
        ("adoptions_total", {}, 3),
        ("adoption_refusals_total", {"code": "transfer"}, 1),
        ("restarts_total", {}, 3),
        ("disk_fallbacks_total", {}, 6),
        ("attaches_total", {"outcome": "granted"}, 7),
        ("attaches_total", {"outcome": "resumed"}, 0),
        ("attaches_total", {"outcome": "content_mismatch"}, 2),
        ("protocol_errors_total", {"code": "protocol"}, 9),
        ("protocol_errors_total", {"code": "slow_reader"}, 1),
        ("load_read_bytes", {}, 3 << 30),
        ("load_stage_seconds", {"stage": "verify"}, 0.5),
        ("load_rate_bytes_per_second", {"stage": "load weights"}, 1.5e9),
        ("build_info", {"version": "1.2.3"}, 1),
        ("uptime_seconds", {}, 60),
    ],
)
def test_a_report_becomes_metrics(name: str, labels: dict[str, str], expected: float) -> None:
    assert value(metrics_of(), name, **labels) == expected


def test_a_histogram_is_cumulative_and_complete() -> None:
    found = metrics_of()
    buckets = {bound: value(found, "attach_seconds_bucket", le=bound) for bound in ("0.001", "0.1", "+Inf")}
    assert buckets == {"0.001": 4, "0.1": 6, "+Inf": 7}
    assert value(found, "attach_seconds_count") == 7
    assert value(found, "attach_seconds_sum") == 3.5
    assert value(found, "load_seconds_bucket", le="10.0") == 1


@pytest.mark.parametrize("state", State)
def test_one_state_is_1(state: State) -> None:
    found = metrics_of(state=state.value)
    assert {one: value(found, "state", state=one.value) for one in State} == {one: one is state for one in State}
    assert value(found, "ready") == (state in (State.READY, State.UPDATING))


def test_what_is_not_known_is_absent() -> None:
    found = metrics_of(adoption_seconds=None, attach_durations=None)
    assert value(found, "adoption_seconds") is None
    assert value(found, "attach_seconds_count") is None


def test_a_place_that_does_not_answer_is_a_metric_too() -> None:
    seen = [Seen(PLACE, report=READY), Seen(OTHER, problem=DaemonUnreachable("nobody listens there"))]
    found = samples(render(seen).decode())
    assert value(found, "up", place=str(PLACE)) == 1
    assert value(found, "up", place=str(OTHER)) == 0
    assert value(found, "problem", place=str(OTHER), code="daemon_unreachable") == 1
    about_it = {name for name, labels in found if ("place", str(OTHER)) in labels}
    assert about_it == {"weightcached_up", "weightcached_problem"}


def test_whatever_a_path_holds_arrives() -> None:
    path = '/models/"quoted" \\back\nline é'
    found = metrics_of(model=path)
    models = [dict(labels)["model"] for name, labels in found if name == "weightcached_model_info"]
    assert models == [path]


def test_processes_are_figures_only_where_they_were_looked_at() -> None:
    assert "host_" not in render([Seen(PLACE, report=READY)]).decode()
    found = samples(render([], Mapped(nbytes=4096, processes=2, hidden=3)).decode())
    assert value(found, "host_unexplained_bytes") == 4096
    assert value(found, "host_unexplained_processes") == 2
    assert value(found, "host_hidden_processes") == 3


class TestDurations:
    def test_a_bound_is_included(self) -> None:
        counts = DurationCounts((1.0, 2.0))
        for seconds in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
            counts.add(seconds)
        assert counts.message() == Durations(bounds_s=(1.0, 2.0), counts=(2, 2, 2), total_s=107.0)

    def test_counts_go_with_bounds(self) -> None:
        with pytest.raises(ValidationError, match="do not go with"):
            Durations(bounds_s=(1.0,), counts=(1,), total_s=1.0)


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("127.0.0.1:9410", "127.0.0.1:9410"),
            ("localhost:1", "127.0.0.1:1"),
            ("127.8.9.10:0", "127.8.9.10:0"),
            ("[::1]:65535", "[::1]:65535"),
        ],
    )
    def test_this_host(self, text: str, shown: str) -> None:
        assert str(parsed(text)) == shown

    @pytest.mark.parametrize(
        "text", ["", "9410", ":9410", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "host:80", "::1"]
    )
    def test_no_address(self, text: str) -> None:
        with pytest.raises(InvalidOption, match="--here"):
            parsed(text)

    @pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "10.1.2.3:80"])
    def test_other_hosts_are_let_in_only_where_that_is_said(self, text: str) -> None:
        with pytest.raises(InvalidOption, match="--others"):
            parsed(text)
        assert str(parsed(text, allow_remote=True)) == text

    def test_ranks_have_ports_of_their_own(self) -> None:
        assert parsed("127.0.0.1:9410").shifted(3) == Address("127.0.0.1", 9413)
        assert parsed("127.0.0.1:0").shifted(3) == Address("127.0.0.1", 0)
        with pytest.raises(InvalidOption):
            parsed("127.0.0.1:65534").shifted(2)


def parsed(text: str, *, allow_remote: bool = False) -> Address:
    return Address.parse(text, option="--here", remote_option="--others", allow_remote=allow_remote)


HOLDER = """
import mmap, sys
maps = [mmap.mmap(int(fd), 0, prot=mmap.PROT_READ) for fd in sys.argv[1:]]
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def mapping(proc: Path, *fds: int) -> Iterator[None]:
    """Another process maps these, and is to be seen in ``proc``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, fds)], pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        yield
        process.communicate(b"")


@pytest.fixture
def segments() -> Iterator[dict[str, int]]:
    """Descriptors of a segment of each of two generations, and of a manifest."""
    with ExitStack() as held:
        made = {}
        for name, nbytes in (
            (names.segment_name("a" * 32, 0), 3 * mmap.PAGESIZE),
            (names.segment_name("b" * 32, 0), 5 * mmap.PAGESIZE),
            (names.manifest_name("b" * 32), mmap.PAGESIZE),
        ):
            made[name] = host.allocate(nbytes, name=name)
            held.callback(os.close, made[name])
        yield made


def test_memory_that_no_daemon_holds_counts_once(segments: dict[str, int], tmp_path: Path) -> None:
    with mapping(tmp_path, *segments.values()), mapping(tmp_path, segments[names.segment_name("b" * 32, 0)]):
        assert unexplained({"a" * 32}, proc=tmp_path) == Mapped(nbytes=5 * mmap.PAGESIZE, processes=2)
        assert unexplained({"a" * 32, "b" * 32}, proc=tmp_path) == Mapped()
        assert unexplained(set(), proc=tmp_path) == Mapped(nbytes=8 * mmap.PAGESIZE, processes=2)
    assert unexplained(set(), proc=tmp_path) == Mapped()  # they have ended


@pytest.mark.root
def test_processes_that_cannot_be_looked_into_are_counted() -> None:
    """An exporter without rights says what it does not know."""
    program = "from weightcached.daemon.mapped import unexplained; print(unexplained(set()).hidden)"
    command = command_as(NOBODY, [sys.executable, "-P", "-c", program])
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(result.stdout) > unexplained(set()).hidden
