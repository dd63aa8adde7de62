"""What a trainer and a worker are given to push through: memory that stays as large as it is, and that only the
trainer writes to.
"""

import errno
import fcntl
import mmap
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import daemon
from tests.support.resources import open_fds
from tests.support.staging import begin_push, push_begun
from weightcached.client.publish.rank import RankPush
from weightcached.daemon.buckets import MEMFD_NAME, make_bucket
from weightcached.protocol.channel import Channel
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Staged
from weightcached.protocol.places import Place

NBYTES = 64 * 1024
WORKER = "weightcached.loader.worker"


@pytest.mark.parametrize("nbytes", [0, NBYTES - 4096, NBYTES + 4096])
def test_nobody_resizes_one(nbytes: int) -> None:
    with OwnedFds([make_bucket(NBYTES)]) as bucket:
        with pytest.raises(PermissionError) as refused:
            os.ftruncate(bucket[0], nbytes)
        assert refused.value.errno == errno.EPERM
        with pytest.raises(PermissionError):
            fcntl.fcntl(bucket[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(bucket[0]).st_size == NBYTES
        assert os.pwrite(bucket[0], b"\1" * NBYTES, 0) == NBYTES


def test_whoever_is_given_one_to_read_sees_what_is_written_and_writes_nothing() -> None:
    with OwnedFds([make_bucket(NBYTES)]) as bucket, OwnedFds([host.export(bucket[0])]) as readable:
        with pytest.raises(OSError, match=re.escape(os.strerror(errno.EBADF))):
            os.pwrite(readable[0], b"\1", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(readable[0], NBYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.pwrite(bucket[0], b"\1", NBYTES - 1)
        assert os.pread(readable[0], 1, NBYTES - 1) == b"\1"


def test_the_worker_of_a_push_has_none_that_it_could_write_to(tmp_path: Path) -> None:
    with daemon(tiny_llama(tmp_path / "model"), tmp_path / "run") as served:
        served.wait_until("ready")
        with push_begun(served, begin_push(served), bucket_count=2):
            [worker] = [one for one in psutil.Process(served.pid).children() if WORKER in " ".join(one.cmdline())]
            numbers = [fd for fd, name in open_fds(worker.pid).items() if MEMFD_NAME in name]
            about = [Path(f"/proc/{worker.pid}/fdinfo/{fd}").read_text() for fd in numbers]
        flags = [int(found[1], 8) for text in about if (found := re.search(r"^flags:\s+(\d+)$", text, re.MULTILINE))]
        assert [flag & os.O_ACCMODE for flag in flags] == [os.O_RDONLY] * 2


def unsealed() -> int:
    return host.allocate(NBYTES, name="unsealed")


def shrinkable() -> int:
    fd = unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def a_file() -> int:
    """Of a disk, and of the right size."""
    fd = os.open(Path(__file__).parent, os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, NBYTES)
    return fd


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (unsealed, f"expected: {NBYTES} bytes, sealed against resizing; found: {NBYTES} bytes, seals"),
        (shrinkable, f"expected: {NBYTES} bytes, sealed against resizing; found: {NBYTES} bytes, seals"),
        (lambda: make_bucket(NBYTES - 4096), f"found: {NBYTES - 4096} bytes"),
        (lambda: make_bucket(NBYTES + 4096), f"found: {NBYTES + 4096} bytes"),
        (a_file, "not memory"),
        (lambda: socket.socket().detach(), "not memory"),
    ],
    ids=["unsealed", "shrinkable", "shorter", "longer", "a file", "a socket"],
)
def test_a_trainer_takes_no_other(make: Callable[[], int], said: str) -> None:
    """Even one of them, and nothing that came with it stays open."""
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    daemon_end, trainer_end = socket.socketpair()
    staged = Staged(generation="0" * 32, base_version="digest:" + "0" * 64, bucket_nbytes=NBYTES, bucket_count=2)
    with theirs, daemon_end, pytest.raises(TransferError, match=re.escape(said)):
        RankPush.of(
            Place(Path("/run/weightcached"), "default", "host-tp0of1"),
            Channel(trainer_end, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT),
            staged,
            OwnedFds([ours.detach(), make_bucket(NBYTES), make()]),
            deadline=Deadline.after(10.0),
        )
    assert set(os.listdir("/proc/self/fd")) == before
