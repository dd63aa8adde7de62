"""What a service manager says and hands back: datagrams, variables, the state record, descriptors of any kind.

Each is understood, or ends in its own error; the supervisor and the keeper lose no descriptor and hold none too many.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.daemon.test_state_record import FULL
from tests.support.checkpoints import tiny_config
from tests.support.fuzzing import MIB, MSGPACK_VALUES, altered, damaged, ends_in, packed, plain
from tests.support.plans import cache_config
from tests.support.resources import open_fds
from weightcached.daemon import listen_fds, state_record
from weightcached.daemon.adoption import examine
from weightcached.daemon.custody import Custody
from weightcached.daemon.holdings import STATE_NAME, stored_names
from weightcached.daemon.listen_fds import HandedOver, take_handed_over
from weightcached.daemon.notify import Notifier
from weightcached.daemon.notify_protocol import (
    KEPT_QUERY,
    MANAGED_VARIABLES,
    BadDatagram,
    Notification,
    decode,
    socket_address,
    usable_name,
    watchdog_interval_s,
)
from weightcached.daemon.state_record import NBYTES, SLOT_NBYTES, StateFile, StateRecord
from weightcached.daemon.supervisor.mailbox import Mailbox
from weightcached.daemon.supervisor.post import Post
from weightcached.daemon.supervisor.store import Store
from weightcached.daemon.vault import NotifyVault, NoVault
from weightcached.protocol.canonical import canonical_sha256
from weightcached.protocol.errors import InvalidEnvironment, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import ManifestMeta
from weightcached.protocol.memory import host, names

# Datagrams

DATAGRAMS = (
    b"READY=1\nSTATUS=serving\nX_OTHER=1",
    b"FDSTORE=1\nFDNAME=g0123.s0\nFDPOLL=0",
    b"FDSTOREREMOVE=1\nFDNAME=listener",
    b"BARRIER=1",
    f"{KEPT_QUERY}=1".encode(),
    b"WATCHDOG=1\nERRNO=5\nSTOPPING=1",
)
DAMAGED_DATAGRAMS = st.sampled_from(DATAGRAMS).flatmap(damaged)


@given(DAMAGED_DATAGRAMS | st.binary(max_size=5000), st.integers(0, 253))
def test_a_datagram(data: bytes, descriptors: int) -> None:
    said = ends_in(BadDatagram, lambda: decode(data, descriptors=descriptors))
    if said is not None:
        assert usable_name(said.name) == said.name
        assert said.store or said.barrier or said.kept_query or not descriptors


@pytest.fixture(scope="module")
def mailbox() -> Iterator[Mailbox]:
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name:
        box = Mailbox(Path(name))
        yield box
        box.close()


@given(st.lists(st.tuples(DAMAGED_DATAGRAMS, st.integers(0, 5)), min_size=1, max_size=4))
def test_datagrams_with_descriptors_through_the_supervisors_socket(
    mailbox: Mailbox, datagrams: list[tuple[bytes, int]]
) -> None:
    before = len(open_fds())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as keeper, OwnedFds(os.pipe()) as pipe:
        keeper.connect(str(mailbox.path))
        keeper.setblocking(False)
        store = Store(limit=3)
        post = Post(mailbox, store)
        for data, count in datagrams:
            # One pipe's end, again and again: each is a descriptor of its own on arrival.
            socket.send_fds(keeper, [data[:8000]], [pipe[1]] * count)
            said = ends_in((), lambda: list(post.read(os.getpid(), 10)))
            assert said is not None
            assert all(isinstance(one, Notification) for one in said)
        assert len(store) <= 3
        assert len(open_fds()) == before + 3 + len(store)
        store.close()
    assert len(open_fds()) == before


# Variables

VALUES = (
    st.text(st.characters(exclude_characters="\0"), max_size=12)
    | st.integers(-5, 5).map(str)
    | st.sampled_from([str(os.getpid()), "1" * 5000, "²", "٣", "0x1", " 1", "1_0", "", "@", "/", "@" * 200, "/x" * 100])
    | st.lists(st.sampled_from(["state", "listener", "g0.s0", ""]), max_size=4).map(":".join)
)
VARIABLES = st.dictionaries(st.sampled_from([*MANAGED_VARIABLES, "FDSTORE", "WEIGHTCACHED_SUPERVISOR"]), VALUES)


@pytest.fixture(scope="module")
def handed() -> Iterator[Callable[[], None]]:
    """Makes two descriptors that are there to be handed over, where nothing else of this process is."""
    before = listen_fds.FIRST
    listen_fds.FIRST = 900
    own = os.memfd_create("handed")

    def hand() -> None:
        for fd in (900, 901):
            os.dup2(own, fd, inheritable=True)

    yield hand
    listen_fds.FIRST = before
    for fd in (900, 901, own):
        os.close(fd)


@given(variables=VARIABLES)
@example({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"})
@example({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "999999999"})
def test_listen_variables(handed: Callable[[], None], variables: dict[str, str]) -> None:
    handed()
    environment = dict(variables)
    before = len(open_fds())
    got = ends_in(InvalidEnvironment, lambda: take_handed_over(environment))
    assert not any(name.startswith("LISTEN_") for name in environment)
    if got is not None:
        assert len(got.names) == len(got.fds)
        assert not any(os.get_inheritable(got.fds[position]) for position in range(len(got.fds)))
        got.fds.close()
        assert len(open_fds()) == before - len(got.names)
    else:
        assert len(open_fds()) == before


@given(VARIABLES)
@example({"FDSTORE": "1" * 5000})  # found: an error of Python's
def test_what_else_a_manager_says(variables: dict[str, str]) -> None:
    ends_in(InvalidEnvironment, lambda: watchdog_interval_s(variables, pid=os.getpid()))
    address = ends_in(InvalidEnvironment, lambda: socket_address(variables.get("NOTIFY_SOCKET", "")))
    if address is not None:
        assert len(address.encode()) <= 107
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        notifier = Notifier(near, watchdog_s=None, supervised=False)
        ends_in((), lambda: NotifyVault.from_environment(notifier, handed=(), environment=dict(variables)))


# The state record

RECORD: dict[str, Any] = plain(FULL.model_dump())


def slot(payload: bytes, *, sequence: int = 2) -> bytes:
    checksum = state_record._checksum(sequence, payload)
    return state_record._HEADER.pack(state_record.MAGIC, sequence, len(payload), checksum) + payload


def state_memfd(data: bytes) -> int:
    fd = StateFile.create().fd
    os.pwrite(fd, b"\0" * NBYTES, 0)
    os.pwrite(fd, data[:SLOT_NBYTES], 0)
    return fd


def read_state(data: bytes) -> StateRecord | None:
    """The record in a memfd whose first slot begins with ``data``; ``None``, said in words, where there is none."""
    fd = state_memfd(data)
    state = ends_in((), lambda: StateFile.open(fd))
    assert state is not None
    try:
        if state.damage is None:
            return state.record
        assert state.record == StateRecord()
        assert len(state.damage) < 2000
        return None
    finally:
        state.close()


@given(altered(RECORD, MSGPACK_VALUES))
def test_a_state_record_of_altered_values(record: Any) -> None:
    """The checksum is right: it was written by a release that means something else, or by someone else."""
    read_state(slot(packed(record)))


@given(damaged(packed(RECORD)) | st.binary(max_size=200))
def test_a_state_record_of_damaged_bytes(payload: bytes) -> None:
    read_state(slot(payload[: SLOT_NBYTES - 52]))


@given(damaged(slot(packed(RECORD))))
def test_a_damaged_slot(data: bytes) -> None:
    assert read_state(data) in (None, FULL)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32))
def test_any_header_of_a_slot(sequence: int, nbytes: int, checksum: bytes) -> None:
    assert read_state(struct.pack("<8sQI32s", state_record.MAGIC, sequence, nbytes, checksum) + packed(RECORD)) is None


# What comes back

ID = "a" * 32
CONFIG = cache_config(tiny_config(), layout="hf")
META = ManifestMeta(
    generation=ID,
    version="digest:1",
    receipts_version="receipts:1",
    fingerprint=CONFIG.fingerprint,
    config=CONFIG.model_dump(),
    digest=None,
    segments_nbytes=(4096,),
    bytes_read=1,
    bytes_kept=1,
    seconds={"load": 0.5},
)


def manifest(meta: Any) -> bytes:
    return packed({"format": 1, "meta": meta, "accounting": b"", "names": [], "dtypes": [], "columns": {}})


def sealed_memfd(name: str, data: bytes) -> int:
    fd = host.allocate(len(data), name=name)
    os.pwrite(fd, data, 0)
    host.seal(fd)
    return fd


def with_its_fingerprint(meta: Any) -> Any:
    """So that the fingerprint is not what is found first."""
    try:
        return {**meta, "fingerprint": canonical_sha256(meta["config"])}
    except (TypeError, KeyError, RecursionError):
        return meta


MANIFESTS = (
    altered(META.model_dump(), MSGPACK_VALUES).map(with_its_fingerprint).map(manifest)
    | damaged(manifest(META.model_dump()))
    | st.binary(max_size=100)
)
DEEP = msgpack.unpackb(b"\x81\xa1a" * 500 + b"\xc0")


@given(MANIFESTS, st.sampled_from([4096, 4096, 4096, 0, 8192]))
@example(manifest(META.model_dump()), 4096)
@example(manifest(with_its_fingerprint({**META.model_dump(), "config": {**CONFIG.model_dump(), "model": DEEP}})), 4096)
def test_what_came_back_is_whole_or_not_adopted(data: bytes, segment_nbytes: int) -> None:
    record = FULL.generations[0].model_copy(update={"id": "0" * 32})
    state = state_memfd(slot(packed(plain(StateRecord(generations=(record,)).model_dump()))))
    fds = [
        sealed_memfd(names.segment_name(ID, 0), bytes(segment_nbytes)),
        sealed_memfd(names.manifest_name(ID), data),
        state,
    ]
    before = len(open_fds())
    handed_over = HandedOver((*stored_names(ID, segments=1), STATE_NAME), OwnedFds(fds))

    async def look() -> None:
        custody = await Custody.open(NoVault(), handed_over)
        try:
            whole = await examine(ID, custody.candidates[ID], None)
            assert whole.config.fingerprint == whole.meta.fingerprint
        finally:
            custody.close()

    ends_in(WeightCacheError, lambda: asyncio.run(look()), memory_max_nbytes=64 * MIB)
    assert len(open_fds()) == before - len(fds)


KINDS: dict[str, Callable[[bytes], int]] = {
    "memfd": lambda data: sealed_memfd("other", data),
    "segment": lambda data: sealed_memfd(names.segment_name(ID, len(data)), data),
    "manifest": lambda data: sealed_memfd(names.manifest_name(ID), data),
    "odd name": lambda data: os.memfd_create(f"weightcached:{ID}:99999999\n"),
    "state": lambda data: state_memfd(slot(data)),
    "not a state": lambda data: os.memfd_create(state_record.MEMFD_NAME),
    "file": lambda data: os.open("/dev/null", os.O_RDONLY),
    "directory": lambda data: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    "path": lambda data: os.open("/", os.O_PATH),
    "eventfd": lambda data: os.eventfd(0),
    "datagram socket": lambda data: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    "tcp socket": lambda data: socket.socket(socket.AF_INET).detach(),
    "socket": lambda data: socket.socket(socket.AF_UNIX).detach(),
    "netlink socket": lambda data: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).detach(),
}
STORED = st.sampled_from(
    ["stored", "state", "listener", f"g{ID}.s0", f"g{ID}.m", "g" + "b" * 32 + ".s0", f"g{ID}.s99999"]
)


@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), STORED, st.binary(max_size=8)), max_size=6))
def test_any_descriptors_come_back(items: list[tuple[str, str, bytes]]) -> None:
    """None is lost, and none stays: custody closes what it does not take."""
    before = len(open_fds())
    fds = [KINDS[kind](data) for kind, _, data in items]
    handed_over = HandedOver(tuple(name for _, name, _ in items), OwnedFds(fds))

    async def look() -> None:
        custody = await Custody.open(NoVault(), handed_over)
        for generation_id, parts in custody.candidates.items():
            await examine_anyway(generation_id, parts)
        custody.close()

    ends_in((), lambda: asyncio.run(look()))
    assert len(open_fds()) == before


async def examine_anyway(generation_id: str, parts: Any) -> None:
    try:
        await examine(generation_id, parts, None)
    except WeightCacheError:
        return
