"""Every way a grant can lie about descriptors, sizes, seals or the manifest: TransferError, and nothing is left of it.

What is left (descriptors, mappings, threads) is counted around every test by conftest.
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import msgpack
import pytest

from tests.client.conftest import RECEIPTS, TENSORS
from weightcached.client import WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import ProtocolError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES
from weightcached.protocol.memory import host
from weightcached.protocol.messages import SegmentInfo
from weightcached.protocol.testing import (
    HonestGrant,
    LyingDaemon,
    Send,
    SendRaw,
    TensorBytes,
    frame,
    honest_grant,
    sealed_memory,
)

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]


def test_an_honest_grant_is_taken(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    with serve(grant.step()), attached() as weights:
        assert weights.source == "daemon"
        assert weights.version == grant.message.version
        assert weights.receipts_version == grant.message.receipts_version
        assert weights.generation == grant.message.generation
        assert weights["codes"].shape == (3, 5)
        weights.verify()


@pytest.mark.parametrize("count", [0, 1, 3, 64])
def test_another_number_of_descriptors(count: int, grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    fds = (grant.fds * 32)[:count]
    with serve(Send(grant.message, fds)), pytest.raises(TransferError, match="number of descriptors"):
        attached()


@pytest.mark.parametrize(("announced", "sent"), [(2, 0), (2, 1), (2, 3), (1, 2), (0, 2), (2, 253)])
def test_descriptors_that_the_frame_does_not_announce(
    announced: int, sent: int, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    fds = (grant.fds * 127)[:sent]
    with serve(SendRaw(frame(grant.message, fd_count=announced), fds)), pytest.raises(TransferError):
        attached()


def test_descriptors_on_a_frame_that_has_none(serve: Serve, grant: HonestGrant, attached: Attached) -> None:
    from weightcached.protocol.messages import Loading

    loading = Loading(stage="read", bytes_done=0, bytes_total=0, bytes_per_s=0.0)
    with serve(Send(loading, grant.fds)), pytest.raises(TransferError, match="descriptors came with"):
        attached()


@contextmanager
def _not_memory(kind: str, like: int) -> Iterator[int]:
    """A descriptor of the same size as memory ``like``, or of none, that is no sealed memfd."""
    with ExitStack() as stack:
        if kind == "pipe":
            yield stack.enter_context(OwnedFds(os.pipe()))[0]
        elif kind == "directory":
            yield stack.enter_context(OwnedFds([os.open("/", os.O_RDONLY)]))[0]
        elif kind == "/dev/null":
            yield stack.enter_context(OwnedFds([os.open("/dev/null", os.O_RDWR)]))[0]
        elif kind == "eventfd":
            yield stack.enter_context(OwnedFds([os.eventfd(0)]))[0]
        else:
            fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
            stack.enter_context(OwnedFds([fd]))
            os.ftruncate(fd, os.fstat(like).st_size)
            yield fd


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("kind", ["pipe", "directory", "/dev/null", "eventfd", "file"])
def test_descriptors_that_are_not_memory(
    kind: str, position: int, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    with _not_memory(kind, grant.fds[position]) as fd:
        fds = list(grant.fds)
        fds[position] = fd
        with serve(Send(grant.message, fds)), pytest.raises(TransferError) as caught:
            attached()
    assert ("the manifest", "segment 0")[position] in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1, 4096])
@pytest.mark.parametrize("position", [0, 1])
def test_memory_of_another_size(
    change: int, position: int, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    data = (grant.manifest, grant.segment)[position]
    data = data[:change] if change < 0 else data + bytes(change)
    with OwnedFds([sealed_memory(data)]) as memory:
        fds = list(grant.fds)
        fds[position] = memory[0]
        with serve(Send(grant.message, fds)), pytest.raises(TransferError, match="another size"):
            attached()


@pytest.mark.parametrize("missing", ["F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE"])
@pytest.mark.parametrize("position", [0, 1])
def test_memory_that_lacks_a_seal(
    missing: str, position: int, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    data = (grant.manifest, grant.segment)[position]
    with OwnedFds([host.allocate(len(data), name="lacking")]) as memory:
        os.pwrite(memory[0], data, 0)
        fcntl.fcntl(memory[0], fcntl.F_ADD_SEALS, host.SEALS & ~getattr(fcntl, missing))
        fds = list(grant.fds)
        fds[position] = memory[0]
        with serve(Send(grant.message, fds)), pytest.raises(TransferError, match="lacks seals"):
            attached()


@pytest.mark.parametrize("position", [0, 1])
def test_memory_that_came_open_for_writing(position: int, grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    """Sealed, so nothing could be written: but a daemon that hands that out is not one of ours."""
    with OwnedFds([os.open(f"/proc/self/fd/{grant.fds[position]}", os.O_RDWR)]) as memory:
        fds = list(grant.fds)
        fds[position] = memory[0]
        with serve(Send(grant.message, fds)), pytest.raises(TransferError, match="open for writing"):
            attached()


def test_a_manifest_that_is_not_the_granted_one(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    other = bytearray(grant.manifest)
    other[len(other) // 2] ^= 1
    with ExitStack() as stack:
        memory = stack.enter_context(OwnedFds([sealed_memory(bytes(other))]))
        stack.enter_context(serve(Send(grant.message, (memory[0], grant.fds[1]))))
        stack.enter_context(pytest.raises(TransferError, match="granted"))
        attached()


def test_a_manifest_over_the_limit_is_refused_by_its_announced_size(
    grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    message = grant.message.model_copy(update={"manifest_nbytes": MANIFEST_MAX_BYTES + 1})
    with serve(Send(message, grant.fds)), pytest.raises(TransferError, match="too large"):
        attached()


def test_a_segment_larger_than_address_space(
    config: CacheConfig, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    """A sparse memfd may claim more than can be mapped: an error, and the segment before it is not left mapped."""
    huge = 1 << 62
    manifest = msgpack.unpackb(grant.manifest)
    manifest["meta"]["segments_nbytes"] = [len(grant.segment), huge]
    with ExitStack() as stack:
        memory = stack.enter_context(OwnedFds([host.allocate(huge, name="huge")]))
        host.seal(memory[0])
        memory.append(host.export(memory[0]))
        changed = stack.enter_context(grant.with_manifest(msgpack.packb(manifest)))
        segments = (*changed.message.segments, SegmentInfo(memory="host", nbytes=huge))
        message = changed.message.model_copy(update={"segments": segments})
        stack.enter_context(serve(Send(message, (*changed.fds, memory[1]))))
        with pytest.raises(TransferError, match="cannot map"):
            attached()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", "f" * 32),
        ("receipts_version", "another"),
        ("segments", ()),
        ("segments", (SegmentInfo(memory="host", nbytes=1),)),
    ],
)
def test_a_grant_that_says_something_else_than_its_manifest(
    field: str, value: object, grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    message = grant.message.model_copy(update={field: value})
    fds = grant.fds[: 1 + len(message.segments)]
    with serve(Send(message, fds)), pytest.raises(TransferError):
        attached()


def test_weights_of_another_config(model: object, config: CacheConfig, serve: Serve, attached: Attached) -> None:
    """The daemon's comparison is not all that stands between an engine and another rank's weights."""
    other = config.model_copy(update={"dtype": "float32"})
    with (
        honest_grant(TENSORS, config=other, receipts=RECEIPTS) as grant,
        serve(grant.step()),
        pytest.raises(TransferError, match="fingerprint"),
    ):
        attached()


MANIFEST_LIES: dict[str, Callable[[dict], None]] = {
    "another format": lambda top: top.update(format=2),
    "no columns": lambda top: top.pop("columns"),
    "a field more": lambda top: top.update(surprise=1),
    "an unknown dtype": lambda top: top.update(dtypes=["float7"] * len(top["dtypes"])),
    "a name twice": lambda top: top.update(names=[top["names"][0]] * len(top["names"])),
    "names too few": lambda top: top.update(names=top["names"][1:]),
    "offsets past the end": lambda top: top["columns"].update(offset=b"\xff" * len(top["columns"]["offset"])),
    "digests too short": lambda top: top["columns"].update(digest=b""),
    "meta of another form": lambda top: top["meta"].update(generation=7),
    "accounting that is no bytes": lambda top: top.update(accounting=[]),
}


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_a_manifest_that_lies(lie: str, grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    top = msgpack.unpackb(grant.manifest)
    MANIFEST_LIES[lie](top)
    with (
        grant.with_manifest(msgpack.packb(top)) as lying,
        serve(lying.step()),
        pytest.raises(TransferError, match="manifest"),
    ):
        attached()


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x90" * 50_000, secrets.token_bytes(4096)])
def test_a_manifest_that_is_none(data: bytes, grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    with grant.with_manifest(data) as lying, serve(lying.step()), pytest.raises(TransferError, match="manifest"):
        attached()


def test_a_row_that_lies_about_its_shape_is_found_when_it_is_asked_for(
    grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    top = msgpack.unpackb(grant.manifest)
    dims = bytearray(top["columns"]["dims"])
    dims[0] = 9
    top["columns"]["dims"] = bytes(dims)
    with grant.with_manifest(msgpack.packb(top)) as lying, serve(lying.step()), attached() as weights:
        assert weights["codes"].shape == (3, 5)
        with pytest.raises(TransferError, match=r"model\.norm\.weight"):
            weights["model.norm.weight"]


def test_content_other_than_the_stated_digest(config: CacheConfig, serve: Serve, attached: Attached) -> None:
    with honest_grant({"a": TensorBytes("uint8", (1,), b"1")}, config=config, digest="a" * 64) as grant:
        with serve(grant.step()), pytest.raises(TransferError, match="other content"):
            attached(digest="b" * 64)
        with serve(grant.step()), attached(digest="a" * 64) as weights:
            assert list(weights) == ["a"]


def test_another_version_than_was_wanted(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    with serve(grant.step()), pytest.raises(TransferError, match="another version"):
        attached(want="another")
    for want in ("current", grant.message.version, grant.message.receipts_version):
        with serve(grant.step()) as daemon, attached(want=want):
            assert daemon.wires[0].messages[0].want == want  # type: ignore[attr-defined]


def test_a_message_that_was_not_asked_for(serve: Serve, attached: Attached) -> None:
    from weightcached.protocol.messages import Pong

    with serve(Send(Pong(token=1))), pytest.raises(ProtocolError, match="not asked"):
        attached()
