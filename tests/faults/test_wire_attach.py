"""A lying daemon against the real ``attach``: each lie is an error of the contract, and nothing of it stays behind.

The client's own tests try what a grant may say (`tests/client/test_transfer.py`, `test_exchange.py`). Here: descriptors
beside frames that lie, resets and half-finished answers, rows that no tensor can be made of, a process at its limits.
"""

import array
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch  # before anything is counted: importing it may keep descriptors and threads

from tests.support.checkpoints import tiny_llama
from tests.support.forked import in_child
from tests.support.resources import nothing_left_behind, open_fds
from weightcached.client import WeightSet, attach
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import (
    ContractError,
    DaemonNotReady,
    DaemonUnreachable,
    ProtocolError,
    TransferError,
    WeightCacheError,
)
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.framing import HEADER
from weightcached.protocol.messages import Loading, Pong, Refused, Unproven
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import (
    Close,
    Drip,
    HonestGrant,
    LyingDaemon,
    Receive,
    ReceiveToEnd,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Step,
    TensorBytes,
    frame,
    frame_lies,
    honest_grant,
)

LOADING = Loading(stage="read", bytes_done=1, bytes_total=2, bytes_per_s=1.0)
TENSORS = {
    "a": TensorBytes("float32", (2, 3), bytes(range(24))),
    "b": TensorBytes("bfloat16", (4,), bytes(range(8))),
    "empty": TensorBytes("uint8", (0, 2), b""),
}
ALIASES = {"tied": "a"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place() -> Iterator[Place]:
    """A place in a fresh directory. Afterwards this process holds what it held before."""
    with nothing_left_behind(), tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as folder:
        place = Place(Path(folder), "default", host_device(tp_size=1, tp_rank=0))
        place.directory.mkdir(mode=0o755)
        yield place


@pytest.fixture
def grant(place: Place, model: Path) -> Iterator[HonestGrant]:
    config = build_config(model, layout="hf", tp_size=1, tp_rank=0)
    with honest_grant(TENSORS, config=config, receipts="1" * 64, aliases=ALIASES) as honest:
        yield honest


Meet = Callable[..., WeightSet]


@pytest.fixture
def meet(place: Place, model: Path) -> Meet:
    """``meet(*steps)``: attach to a daemon that reads the Hello and then takes these steps."""

    def meet(*steps: Step, timeout_s: float = 10.0) -> WeightSet:
        with LyingDaemon(place.socket_path, [Receive(), *steps, ReceiveToEnd()]):
            return attach(model, mode="require", runtime_dir=place.runtime_dir, timeout_s=timeout_s)

    return meet


def test_the_honest_grant_is_accepted(grant: HonestGrant, meet: Meet) -> None:
    """Or nothing below would prove anything."""
    with meet(grant.step()) as weights:
        assert weights["tied"] is weights["a"]
        assert bytes(weights["b"].view(torch.uint8)) == bytes(range(8))


LIES = sorted(frame_lies(LOADING, pickle_target="x"))


@pytest.mark.parametrize("lie", LIES)
def test_descriptors_beside_a_lying_frame_are_closed(lie: str, grant: HonestGrant, meet: Meet, tmp_path: Path) -> None:
    """They arrive with the first byte, long before the lie is seen. The fixture counts."""
    target = tmp_path / "pickled"
    with pytest.raises(ContractError):
        meet(SendRaw(frame_lies(grant.message, pickle_target=str(target))[lie], grant.fds))
    assert not target.exists()


@pytest.mark.parametrize("position", [HEADER.size, HEADER.size + 1])
def test_descriptors_that_come_late_are_refused(position: int, grant: HonestGrant, meet: Meet) -> None:
    """Within the header the kernel may merge two writes into one read: only later is late for certain."""
    data = frame(grant.message, fd_count=2)
    with pytest.raises(TransferError):
        meet(SendRaw(data[:position]), SendRaw(data[position:], grant.fds))


def test_descriptors_of_the_second_of_two_merged_frames_are_refused(grant: HonestGrant, meet: Meet) -> None:
    """The kernel ties them to the first byte of the write, so they would be taken for the Loading's."""
    with pytest.raises(TransferError):
        meet(SendRaw(frame(LOADING) + frame(grant.message, fd_count=2), grant.fds))


def test_merged_frames_with_descriptors_on_the_first_byte_are_one_after_the_other(
    grant: HonestGrant, meet: Meet
) -> None:
    """What follows a grant that nobody asked for ends the lease, not the weights."""
    merged = frame(grant.message, fd_count=2) + frame(Pong(token=1))
    with meet(SendRaw(merged, grant.fds)) as weights:
        assert bytes(weights["b"].view(torch.uint8)) == bytes(range(8))


@pytest.mark.parametrize("mode", [os.O_PATH, os.O_WRONLY], ids=["no access", "write only"])
@pytest.mark.parametrize("position", [0, 1])
def test_descriptors_that_cannot_be_read_are_refused(mode: int, position: int, grant: HonestGrant, meet: Meet) -> None:
    with OwnedFds([os.open(f"/proc/self/fd/{grant.fds[position]}", mode)]) as other:
        fds = list(grant.fds)
        fds[position] = other[0]
        with pytest.raises(TransferError, match="read"):
            meet(Send(grant.message, fds))


def test_the_same_descriptor_twice_is_refused(grant: HonestGrant, meet: Meet) -> None:
    for fd in grant.fds:
        with pytest.raises(TransferError):
            meet(Send(grant.message, (fd, fd)))


@pytest.mark.parametrize(
    "script",
    [
        [Close()],
        [Send(LOADING), Close()],
        [Send(Unproven(reason="x", rule="y")), Close()],
        [Send(Unproven(reason="x", rule="y")), Reset()],
    ],
    ids=["at once", "while loading", "instead of a digest's answer", "with the digest unread"],
)
def test_a_daemon_that_goes_away_is_unreachable(script: list[Step], meet: Meet) -> None:
    with pytest.raises((DaemonUnreachable, DaemonNotReady)):
        meet(*script, timeout_s=3.0)


def test_a_daemon_that_resets_the_connection_is_unreachable(place: Place, model: Path) -> None:
    """It never reads the Hello: what the client gets is ECONNRESET, not an end of file."""
    with LyingDaemon(place.socket_path, [Reset()]), pytest.raises(DaemonUnreachable):
        attach(model, mode="require", runtime_dir=place.runtime_dir, timeout_s=0.5)


@pytest.mark.parametrize("length", [1, HEADER.size, HEADER.size + 1, -1])
def test_a_grant_cut_short_after_its_descriptors_came_leaves_none(length: int, grant: HonestGrant, meet: Meet) -> None:
    data = frame(grant.message, fd_count=2)[:length]
    with pytest.raises(ProtocolError, match="cut off"):
        meet(SendRaw(data, grant.fds), Close())


@pytest.mark.parametrize(
    "step",
    [
        Repeat(Send(LOADING), every_s=0),
        Repeat(SendRaw(frame(LOADING) * 50), every_s=0),
        Drip(frame(LOADING) * 1_000, every_s=0.02),
        Repeat(Send(Unproven(reason="x", rule="y")), every_s=0.05),
    ],
    ids=["loading for ever", "a flood", "dripping", "never satisfied"],
)
def test_no_daemon_holds_an_attach_longer_than_its_deadline(step: Step, meet: Meet) -> None:
    start = time.monotonic()
    with pytest.raises(WeightCacheError):
        meet(step, timeout_s=0.5)
    assert time.monotonic() - start < 5


def column(code: str, *values: int) -> bytes:
    return array.array(code, values).tobytes()


# Rows are "a", "b", "empty", "tied": dims (2, 3), (4,), (0, 2), (2, 3).
ROW_LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bytes that are not the shape's": ("b", {"nbytes": column("Q", 24, 6, 0, 24)}),
    "a shape that is not the bytes'": ("b", {"dims": column("Q", 2, 3, 5, 0, 2, 2, 3)}),
    "strides past the row": ("a", {"strides": column("q", 300, 1, 1, 2, 1, 3, 1)}),
    "more elements than can be": ("empty", {"dims": column("Q", 2, 3, 4, 0, (1 << 64) - 1, 2, 3)}),
    "an alias of another shape": ("tied", {"dims": column("Q", 2, 3, 4, 0, 2, 3, 2)}),
    "an alias elsewhere": ("tied", {"alias": column("i", -1, -1, -1, 1)}),
    "a number of dimensions over another": ("b", {"ndim": column("B", 1, 2, 2, 2)}),
}


@pytest.mark.parametrize("lie", ROW_LIES)
def test_a_lying_row_is_a_transfer_error_and_never_a_tensor(lie: str, grant: HonestGrant, meet: Meet) -> None:
    name, columns = ROW_LIES[lie]
    top = msgpack.unpackb(grant.manifest)
    top["columns"].update(columns)
    with grant.with_manifest(msgpack.packb(top)) as lying, pytest.raises(TransferError, match="manifest"):
        use(meet(lying.step()), name)


def use(weights: WeightSet, name: str) -> None:
    with weights:
        _ = weights[name]


def test_bytes_that_are_not_the_digests_are_found_when_verified(grant: HonestGrant, meet: Meet) -> None:
    top = msgpack.unpackb(grant.manifest)
    top["columns"]["digest"] = bytes(len(top["columns"]["digest"]))
    with grant.with_manifest(msgpack.packb(top)) as lying, pytest.raises(TransferError):
        verify(meet(lying.step()))


def verify(weights: WeightSet) -> None:
    with weights:
        weights.verify()


def test_refusals_at_their_largest_are_still_errors_that_can_be_printed(meet: Meet) -> None:
    text = "x" * 32 * 1024
    with pytest.raises(WeightCacheError) as raised:
        meet(Send(Refused(code="daemon_failed", message=text, expected=text, found=text, where=text, next_step=text)))
    assert str(raised.value)


def test_an_engine_without_free_descriptors_fails_and_keeps_none(grant: HonestGrant, place: Place, model: Path) -> None:
    """The kernel gives as many as fit and drops the others. In a child of its own, because the limit is a process's."""

    def attach_at_the_limit() -> None:
        before = open_fds()
        free = [number for number in range(max(before) + 20) if number not in before]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        outcomes = []
        for count in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], hard))  # numbers below the limit can be had
            try:
                attach(model, mode="require", runtime_dir=place.runtime_dir, timeout_s=5).close()
                outcomes.append("attached")
            except WeightCacheError as error:
                outcomes.append(type(error).__name__)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            assert open_fds() == before, outcomes
        assert outcomes[-1] == "attached", outcomes
        assert "TransferError" in outcomes, outcomes

    with LyingDaemon(place.socket_path, [Receive(), grant.step(), ReceiveToEnd()]):
        in_child(attach_at_the_limit)
