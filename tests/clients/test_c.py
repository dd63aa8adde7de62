"""The client in C, built from the page on the wire alone: with a real daemon, at each row of the contract, and with a
daemon that lies. It is compiled here, with sanitizers: a read out of bounds ends it with a status that no test expects.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import daemon, digest_of, scripted_daemon
from tests.support.resources import open_fds
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Hello, Loading, Pong, Refused, SegmentInfo, Unproven
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import (
    Drip,
    HonestGrant,
    LyingDaemon,
    Receive,
    ReceiveToEnd,
    Send,
    SendRaw,
    Step,
    TensorBytes,
    frame,
    honest_grant,
)

SOURCE = Path(__file__).parent / "c/attach.c"
LIBRARY = "-l:libxxhash.so.0"
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

(OK, DIFFERS, ABSENT, UNREACHABLE, UNTRUSTED, NOT_READY, MISMATCH, REFUSED, PROTOCOL, TRANSFER, INVALID_PLACE) = (
    0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11
)  # fmt: skip

TENSORS = {
    "a": TensorBytes("float32", (2, 3), bytes(range(24))),
    "b": TensorBytes("bfloat16", (300,), bytes(600)),
    "empty": TensorBytes("uint8", (0, 2), b""),
}
Ends = Callable[..., subprocess.CompletedProcess[str]]


def built(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = folder / "attach"
    done = subprocess.run(
        [compiler, *WARNINGS, *options, "-o", program, SOURCE, LIBRARY], capture_output=True, text=True, timeout=100
    )
    if "cannot find" in done.stderr and LIBRARY in done.stderr:
        pytest.skip("no libxxhash.so.0")
    assert (done.returncode, done.stderr) == (0, "")
    return program


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("c"), *SANITIZERS)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        place = Place(Path(name), "default", host_device(tp_size=1, tp_rank=0))
        place.directory.mkdir(mode=0o755)
        yield place


@pytest.fixture
def config(model: Path) -> CacheConfig:
    return build_config(model, layout="hf", tp_size=1, tp_rank=0)


@pytest.fixture
def words(program: Path, place: Place, config: CacheConfig) -> Callable[..., list[str]]:
    """``words(content=…, fingerprint=…, seconds=…)``: the command line."""

    def run(*, content: str = "current", fingerprint: str = config.fingerprint, seconds: int | str = 30) -> list[str]:
        return [
            str(program),
            str(place.runtime_dir),
            f"{place.name}/{place.device}",
            fingerprint,
            content,
            str(seconds),
        ]

    return run


@pytest.fixture
def attach(words: Callable[..., list[str]]) -> Ends:
    """Run the client to its end; standard input has ended, so it does not hold its lease."""

    def run(**options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words(**options), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60
        )

    return run


@pytest.fixture
def grant(config: CacheConfig) -> Iterator[HonestGrant]:
    with honest_grant(TENSORS, config=config, digest="d" * 64, aliases={"tied": "a"}) as it:
        yield it


def rows_of(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if not line.startswith(("attached: ", "unchanged"))]


def test_it_compiles_without_a_warning_as_its_first_lines_say(tmp_path: Path) -> None:
    text = SOURCE.read_text()
    command = re.search(r"^ \*   cc -o attach attach\.c (\S+)$", text, re.M)
    assert command is not None
    assert command[1] == LIBRARY
    built(tmp_path, "-O2")


@pytest.mark.parametrize("seconds", ["", "ten", "5s", "-1", "99999999999999999999"])
def test_seconds_that_are_no_number_are_refused(attach: Ends, seconds: str) -> None:
    done = attach(seconds=seconds)
    assert (done.returncode, done.stdout) == (64, "")
    assert f'not "{seconds}"' in done.stderr


def test_it_has_every_row_of_a_real_daemon_holds_a_lease_and_outlives_it(
    words: Callable[..., list[str]], model: Path, place: Place
) -> None:
    with daemon(model, place.runtime_dir) as served:
        report = served.wait_until("ready")
        grant, fds = served.attach()
        with fds:
            manifest = Manifest.decode(os.pread(fds[0], grant.manifest_nbytes, 0))
        wanted = [
            [row.name, str(row.segment), str(row.offset), str(row.nbytes), row.dtype, row.digest.hex()]
            for row in manifest
        ]
        with subprocess.Popen(
            words(content=digest_of(model)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdout is not None
            lines = []
            while (line := client.stdout.readline()) and not line.startswith("attached: "):
                lines.append(line)
            assert rows_of("".join(lines)) == wanted
            assert line.startswith(f"attached: {len(wanted)} rows, generation {report.generation}, version ")
            assert [(lease.name, lease.pid) for lease in served.report().leases] == [("client in C", client.pid)]
            held = sorted(what.partition(":")[0] for fd, what in open_fds(client.pid).items() if fd > 2)
            assert held == ["socket"]
            served.stop(9)
            output, complaint = client.communicate(timeout=60)
            assert (client.returncode, output) == (OK, "unchanged\n"), complaint


def test_the_lease_ends_with_the_process(attach: Ends, model: Path, place: Place) -> None:
    with scripted_daemon(model, place.runtime_dir) as served:
        generation = served.wait_until("ready").generation
        done = attach()
        assert (done.returncode, done.stderr) == (OK, "")
        assert f"generation {generation}" in done.stdout
        deadline_s = time.monotonic() + 20
        while served.report().lease_count:
            assert time.monotonic() < deadline_s
        assert served.report().attaches == {"granted": 1}


def test_another_config_or_content_is_a_mismatch(attach: Ends, model: Path, place: Place) -> None:
    with scripted_daemon(model, place.runtime_dir) as served:
        served.wait_until("ready")
        done = attach(fingerprint="0" * 64)
        assert (done.returncode, done.stderr.partition(":")[0]) == (MISMATCH, "config_mismatch")
        done = attach(content="0" * 64)
        *_, last = done.stderr.splitlines()  # before it, perhaps, that the daemon computes its own digest
        assert (done.returncode, last.partition(":")[0]) == (MISMATCH, "content_mismatch")
        assert attach(content=digest_of(model)).returncode == OK


def test_a_load_that_does_not_end_or_has_failed(attach: Ends, model: Path, place: Place) -> None:
    with scripted_daemon(model, place.runtime_dir, script={"hang_at": "job"}) as served:
        served.wait_logged("listening")
        done = attach(seconds=1)
        assert done.returncode == NOT_READY
        assert done.stderr.startswith("loading: ")
        served.stop(9)
    fail = {"code": "truncated_file", "message": "model.safetensors is cut short", "transient": False}
    with scripted_daemon(model, place.runtime_dir, script={"fail_at": "job", "fail": fail}) as served:
        served.wait_until("failed")
        done = attach()
        assert (done.returncode, done.stderr.partition(":")[0]) == (REFUSED, "daemon_failed")


def test_absent_is_told_from_everything_else(attach: Ends, place: Place) -> None:
    assert attach().returncode == ABSENT
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(place.socket_path))
        assert attach().returncode == UNREACHABLE
    place.socket_path.unlink()
    place.socket_path.write_text("not a socket")
    assert attach().returncode == INVALID_PLACE
    place.socket_path.unlink()
    place.socket_path.symlink_to("nowhere")
    assert attach().returncode == INVALID_PLACE
    place.socket_path.unlink()
    place.directory.rmdir()
    assert attach().returncode == ABSENT
    place.directory.write_text("not a directory")
    assert attach().returncode == INVALID_PLACE
    place.directory.unlink()
    place.directory.mkdir()


@pytest.mark.parametrize("which", ["runtime_dir", "directory"])
def test_a_directory_that_others_can_write_to_is_not_trusted(
    which: str, attach: Ends, place: Place, grant: HonestGrant
) -> None:
    with LyingDaemon(place.socket_path, [Receive(), grant.step(), ReceiveToEnd()]) as lying:
        getattr(place, which).chmod(0o1777)
        done = attach()
        assert done.returncode == UNTRUSTED
        assert str(getattr(place, which)) in done.stderr
        assert lying.wires == [] or lying.wires[0].messages == []
        getattr(place, which).chmod(0o755)
        assert attach().returncode == OK


def altered(grant: HonestGrant, **changes: object) -> Send:
    return Send(grant.message.model_copy(update=changes), grant.fds)


def with_fd(grant: HonestGrant, position: int, fd: int) -> Send:
    fds = list(grant.fds)
    fds[position] = fd
    return Send(grant.message, tuple(fds))


def writable(data: bytes, *, sealed: bool) -> int:
    fd = host.allocate(len(data), name="weightcached-test")
    os.pwrite(fd, data, 0)
    if sealed:
        host.seal(fd)
    return fd


def read_only(fd: int) -> int:
    try:
        return host.export(fd)
    finally:
        os.close(fd)


LIES: dict[str, tuple[int, Callable[[HonestGrant], Step]]] = {
    "no frame": (PROTOCOL, lambda _: SendRaw(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
    "another version": (PROTOCOL, lambda _: SendRaw(b"WCD1\2\0\x41\0\0\0\0\0\0\0\0\0")),
    "an unknown type": (PROTOCOL, lambda _: SendRaw(b"WCD1\1\0\x48\0\0\0\0\0\0\0\0\0")),
    "a body of 4 GiB": (PROTOCOL, lambda _: SendRaw(b"WCD1\1\0\x41\0\xff\xff\xff\xff\0\0\0\0")),
    "half a frame": (UNREACHABLE, lambda grant: SendRaw(frame(grant.message)[:40])),
    "an answer that was not asked for": (PROTOCOL, lambda _: Send(Pong(token=1))),
    "unproven": (MISMATCH, lambda _: Send(Unproven(reason="", rule=""))),
    "a refusal": (REFUSED, lambda _: Send(Refused(code="internal", message="a bug"))),
    "an unknown code": (REFUSED, lambda _: Send(Refused(code="nothing", message=""))),
    "fewer descriptors than announced": (
        TRANSFER,
        lambda grant: SendRaw(frame(grant.message, fd_count=2), grant.fds[:1]),
    ),
    "more descriptors than announced": (
        TRANSFER,
        lambda grant: SendRaw(frame(grant.message, fd_count=1), grant.fds),
    ),
    "more descriptors than segments": (TRANSFER, lambda grant: Send(grant.message, (*grant.fds, grant.fds[1]))),
    "no descriptors": (TRANSFER, lambda grant: Send(grant.message)),
    "descriptors with a report on a load": (
        TRANSFER,
        lambda grant: Send(Loading(stage="read", bytes_done=0, bytes_total=0, bytes_per_s=0), grant.fds),
    ),
    "the segment for the manifest": (TRANSFER, lambda grant: Send(grant.message, grant.fds[::-1])),
    "another generation": (TRANSFER, lambda grant: altered(grant, generation="0" * 32)),
    "another version's receipts": (TRANSFER, lambda grant: altered(grant, receipts_version="0")),
    "another manifest": (TRANSFER, lambda grant: altered(grant, manifest_sha256="0" * 64)),
    "a shorter manifest": (
        TRANSFER,
        lambda grant: altered(grant, manifest_nbytes=grant.message.manifest_nbytes - 1),
    ),
    "a manifest of 1 GiB": (TRANSFER, lambda grant: altered(grant, manifest_nbytes=1 << 30)),
    "a larger segment": (
        TRANSFER,
        lambda grant: altered(grant, segments=(SegmentInfo(memory="host", nbytes=len(grant.segment) + 1),)),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_it_with_its_status(lie: str, attach: Ends, place: Place, grant: HonestGrant) -> None:
    status, step = LIES[lie]
    with LyingDaemon(place.socket_path, [Receive(), step(grant)]) as lying:
        done = attach()
    assert done.returncode == status, done.stderr
    assert "attached" not in done.stdout
    (said,) = lying.wires[0].messages
    assert isinstance(said, Hello)


@pytest.mark.parametrize("what", ["not sealed", "open for writing", "a pipe"])
@pytest.mark.parametrize("position", [0, 1])
def test_memory_that_could_change_is_refused(
    what: str, position: int, attach: Ends, place: Place, grant: HonestGrant
) -> None:
    data = (grant.manifest, grant.segment)[position]
    if what == "a pipe":
        fds = OwnedFds(os.pipe())
    elif what == "not sealed":
        fds = OwnedFds([read_only(writable(data, sealed=False))])
    else:
        fds = OwnedFds([writable(data, sealed=True)])
    with fds, LyingDaemon(place.socket_path, [Receive(), with_fd(grant, position, fds[0])]):
        done = attach()
    assert done.returncode == TRANSFER, done.stderr


def test_one_byte_that_differs_is_found(attach: Ends, place: Place, grant: HonestGrant) -> None:
    segment = bytearray(grant.segment)
    segment[0] ^= 1
    with (
        OwnedFds([read_only(writable(bytes(segment), sealed=True))]) as fds,
        LyingDaemon(place.socket_path, [Receive(), with_fd(grant, 1, fds[0])]),
    ):
        done = attach()
    assert done.returncode == DIFFERS
    assert done.stderr.startswith("a: ")


def test_a_daemon_that_drips_is_given_up_at_the_deadline(attach: Ends, place: Place, grant: HonestGrant) -> None:
    with LyingDaemon(place.socket_path, [Receive(), Drip(frame(grant.message), every_s=0.3)]):
        begun_s = time.monotonic()
        assert attach(seconds=1).returncode == NOT_READY
        assert time.monotonic() - begun_s < 20


def test_a_reading_of_what_it_says_is_a_valid_hello(attach: Ends, place: Place, grant: HonestGrant) -> None:
    with LyingDaemon(place.socket_path, [Receive(), grant.step(), ReceiveToEnd()]) as lying:
        done = attach(content="d" * 64)
    assert (done.returncode, len(rows_of(done.stdout))) == (OK, 4)
    (hello,) = lying.wires[0].messages
    assert isinstance(hello, Hello)
    assert (hello.want, hello.digest, hello.receipts) == ("checkpoint", "d" * 64, None)


COLUMNS = ("segment", "offset", "nbytes", "dtype", "kind", "persistent", "alias", "ndim", "dims", "strides", "digest")


def twisted(manifest: bytes, rng: random.Random) -> bytes:
    """A manifest in which something is not as it was: a column's bytes, its length, or any byte at all."""
    if rng.random() < 0.4:
        data = bytearray(manifest)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data[: rng.randint(1, len(data))]) if rng.random() < 0.3 else bytes(data)
    top = msgpack.unpackb(manifest)
    name = rng.choice(COLUMNS)
    column = bytearray(top["columns"][name])
    if rng.random() < 0.2:
        del column[rng.randrange(len(column)) :]
    else:
        column[rng.randrange(len(column))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    top["columns"][name] = bytes(column)
    return msgpack.packb(top)


@pytest.mark.slow
def test_no_manifest_makes_it_read_out_of_bounds(attach: Ends, place: Place, grant: HonestGrant) -> None:
    """Every way out is a status of its own; a sanitizer's is none of them."""
    rng = random.Random(20261130)  # the same every time
    seen = set()
    for _ in range(120):
        manifest = twisted(grant.manifest, rng)
        with (
            grant.with_manifest(manifest) as lie,
            LyingDaemon(place.socket_path, [Receive(), lie.step(), ReceiveToEnd()]),
        ):
            done = attach()
        assert done.returncode in (OK, DIFFERS, PROTOCOL, TRANSFER), (manifest, done.stderr)
        assert "Sanitizer" not in done.stderr
        seen.add(done.returncode)
    assert {PROTOCOL, TRANSFER} <= seen
