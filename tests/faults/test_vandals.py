"""Engines that try to change the weights they were granted: nobody else ever sees another byte, and all is as before.

A real daemon and a real checkpoint; the vandal attaches as a user whom the daemon serves, as root too, and tries what
the kernel offers. Somebody who had the weights before, somebody who comes after, and the daemon itself look afterwards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import xxhash

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import Daemon, connect, converse, daemon
from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY, folder_for_everyone
from tests.support.vandal import reopen_through, vandalise
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host, names
from weightcached.protocol.messages import Grant, Hello
from weightcached.protocol.places import Place

AS = pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=pytest.mark.root)], ids=["own user", "nobody"])

MUST_FAIL = (
    "write",
    "pwrite",
    "pwritev",
    "append",
    "shrink",
    "grow",
    "punch a hole",
    "zero",
    "sendfile",
    "copy_file_range",
    "map for writing",
    "map, then allow writing",
    "/proc/self/mem",
    "process_vm_writev",
    "MADV_REMOVE",
    "add a seal",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with folder_for_everyone() as folder:
        model = tiny_llama(folder / "model")
        allow = ["--allow-uid", str(NOBODY)] if os.geteuid() == 0 else []
        with daemon(model, folder / "run", *allow) as started:
            started.wait_until("ready")
            started.wait_logged("content digest")
            yield started


class Onlooker:
    """An engine that is granted the weights, maps them as engines do, and looks at every byte."""

    def __init__(self, served: Daemon, closing: ExitStack) -> None:
        channel = closing.enter_context(_Closing(served.place)).channel
        grant, fds = served.attach(channel, want="current")
        with fds:
            data = os.pread(fds[0], grant.manifest_nbytes, 0)
            assert hashlib.sha256(data).hexdigest() == grant.manifest_sha256
            self.manifest = Manifest.decode(data)
            self.mapping = host.map_private(fds[1], nbytes=grant.segments[0].nbytes)
        closing.callback(self.mapping.close)
        self.grant = grant

    def require_true(self) -> str:
        """Every parameter has its digest. Returns one digest of all bytes, the gaps between parameters included."""
        view = self.mapping.view()
        for row in self.manifest:
            found = xxhash.xxh3_128_digest(view[row.offset : row.offset + row.nbytes])
            assert found == row.digest, row.name
        return hashlib.sha256(view).hexdigest()


class _Closing:
    def __init__(self, place: Place) -> None:
        self.channel = connect(place)

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def granted(place: Place, hello: Hello) -> tuple[Grant, OwnedFds]:
    """Attach as whoever this process is."""
    frame = converse(connect(place), hello)
    assert isinstance(frame.message, Grant), frame.message
    return frame.message, frame.fds


@AS
def test_nothing_a_vandal_tries_changes_a_byte_that_others_see(served: Daemon, uid: int | None) -> None:
    hello = served.hello(want="current")

    def vandal() -> None:
        grant, fds = granted(served.place, hello)
        for position, nbytes in enumerate([grant.manifest_nbytes, grant.segments[0].nbytes]):
            outcomes = vandalise(fds[position], nbytes=nbytes)
            # It was possible to open them again for writing: then the seals had to hold, and did.
            assert outcomes["reopen read-write"] == "done"
            for how in ("as lent", "read-write"):
                done = [name for name in MUST_FAIL if outcomes[f"{how}: {name}"] == "done"]
                assert not done, f"{how}: {done}"
            assert outcomes["reopen truncating"] != "done"

    with ExitStack() as closing:
        before = Onlooker(served, closing)
        bytes_before = before.require_true()
        in_child(vandal, uid=uid)
        assert before.require_true() == bytes_before
        after = Onlooker(served, closing)
        assert after.grant == before.grant
        assert after.require_true() == bytes_before
        report = served.report()
        assert (report.state, report.generation, report.lease_count) == ("ready", before.grant.generation, 2)


@AS
def test_the_daemons_own_descriptors_are_no_way_in(served: Daemon, uid: int | None) -> None:
    """Through /proc: for a user without rights closed; for root open, and sealed all the same."""
    with ExitStack() as closing:
        before = Onlooker(served, closing)
        bytes_before = before.require_true()
        name = names.segment_name(before.grant.generation, 0)

        def intrude() -> None:
            found = 0
            for fd in reopen_through(served.pid, name):
                found += 1
                outcomes = vandalise(fd, nbytes=before.grant.segments[0].nbytes)
                assert not [one for one in MUST_FAIL if outcomes[f"as lent: {one}"] == "done"]
            assert found

        def kept_out() -> None:
            with pytest.raises(PermissionError):
                list(reopen_through(served.pid, name))
            with pytest.raises(PermissionError):
                os.open(f"/proc/{served.pid}/mem", os.O_RDONLY)
            with pytest.raises(PermissionError):
                os.kill(served.pid, 0)

        in_child(kept_out if uid else intrude, uid=uid)
        assert before.require_true() == bytes_before


@pytest.mark.root
def test_a_user_without_rights_cannot_close_the_weights_to_others(served: Daemon) -> None:
    """Mode and owner of a memfd belong to whoever made it: with them others could be kept from opening it."""
    hello = served.hello(want="current")

    def lock_out() -> None:
        _, fds = granted(served.place, hello)
        for position in range(len(fds)):
            for attempt in (lambda fd: os.fchmod(fd, 0), lambda fd: os.fchown(fd, NOBODY, NOBODY)):
                with pytest.raises(PermissionError):
                    attempt(fds[position])

    in_child(lock_out, uid=NOBODY)
    with ExitStack() as closing:
        Onlooker(served, closing).require_true()
