"""Host memory: every effect of the seals tried for real, as root and as nobody; private writes; mappings' lifetime."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.forked import in_child
from tests.support.resources import memfd_mappings, nothing_left_behind, open_fds
from tests.support.unprivileged import NOBODY
from weightcached.protocol.errors import InsufficientMemory, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host

NBYTES = 3 * mmap.PAGESIZE
DATA = bytes(range(256)) * (NBYTES // 256)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2

libc = ctypes.CDLL(None, use_errno=True)


def errno_of(result: int) -> int:
    return ctypes.get_errno() if result == -1 else 0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture
def writable() -> Iterator[int]:
    """A segment with DATA in it, not sealed."""
    with OwnedFds([host.allocate(NBYTES, name="test-segment")]) as fds:
        os.pwrite(fds[0], DATA, 0)
        yield fds[0]


@pytest.fixture
def sealed(writable: int) -> int:
    host.seal(writable)
    return writable


@pytest.fixture
def exported(sealed: int) -> Iterator[int]:
    """What an engine receives."""
    with OwnedFds([host.export(sealed)]) as fds:
        yield fds[0]


def try_everything(fd: int) -> None:
    """Every way to change sealed memory through ``fd``, a descriptor opened for writing, fails; reading works."""

    def refused(number: int, change, *arguments) -> None:
        with pytest.raises(OSError) as raised:  # noqa: PT011  # the number is what counts
            change(*arguments)
        assert raised.value.errno == number, change

    refused(errno.EPERM, os.write, fd, b"x")
    refused(errno.EPERM, os.pwrite, fd, b"x", 0)
    refused(errno.EPERM, os.pwrite, fd, b"x", NBYTES)
    refused(errno.EPERM, os.ftruncate, fd, 0)
    refused(errno.EPERM, os.ftruncate, fd, NBYTES - 1)
    refused(errno.EPERM, os.ftruncate, fd, NBYTES + 1)
    refused(errno.EPERM, os.posix_fallocate, fd, NBYTES, 1)
    refused(errno.EPERM, fcntl.fcntl, fd, fcntl.F_ADD_SEALS, 0)
    refused(errno.EPERM, mmap.mmap, fd, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    hole = libc.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(4096))
    assert errno_of(hole) == errno.EPERM
    assert os.pread(fd, NBYTES, 0) == DATA


def test_a_sealed_segment_cannot_be_changed_through_the_descriptor_that_filled_it(sealed: int) -> None:
    try_everything(sealed)


@pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=pytest.mark.root)], ids=["root", "nobody"])
def test_reopening_a_received_descriptor_for_writing_changes_nothing(exported: int, uid: int | None) -> None:
    """It may be reopened: its mode says so. It stays sealed."""

    def reopen() -> None:
        reopened = os.open(f"/proc/self/fd/{exported}", os.O_RDWR)
        try_everything(reopened)
        os.close(reopened)

    in_child(reopen, uid=uid)


@pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=pytest.mark.root)], ids=["root", "nobody"])
def test_an_exported_descriptor_reads_and_nothing_else(exported: int, uid: int | None) -> None:
    def use() -> None:
        assert os.pread(exported, NBYTES, 0) == DATA
        assert fcntl.fcntl(exported, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(exported, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(exported, NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    in_child(use, uid=uid)


def test_descriptors_are_not_inherited(sealed: int, exported: int) -> None:
    assert not os.get_inheritable(sealed)
    assert not os.get_inheritable(exported)


def test_segments_cannot_be_executed(writable: int) -> None:
    """The kernel knows the flag since 6.3; there the mode has no x and none can be added."""
    if not os.fstat(writable).st_mode & 0o111:
        with pytest.raises(PermissionError):
            os.fchmod(writable, 0o777)


def test_a_shared_read_only_mapping_cannot_be_made_writable(exported: int) -> None:
    mapping = host.map_readonly(exported, nbytes=NBYTES)
    assert bytes(mapping.view()) == DATA
    protect = libc.mprotect(ctypes.c_void_p(mapping.address), NBYTES, mmap.PROT_READ | mmap.PROT_WRITE)
    assert errno_of(protect) == errno.EACCES
    mapping.close()


def test_a_write_through_a_read_only_mapping_kills_the_writer(exported: int) -> None:
    mapping = host.map_readonly(exported, nbytes=NBYTES)
    with pytest.raises(AssertionError, match=f"status {int(signal.SIGSEGV)}"):
        in_child(lambda: mapping.view().__setitem__(0, 1))
    mapping.close()


def test_private_writes_stay_private(exported: int) -> None:
    first, second = (host.map_private(exported, nbytes=NBYTES) for _ in range(2))
    first.view()[:3] = b"\xff\xff\xff"
    assert bytes(first.view()[:4]) == b"\xff\xff\xff\x03"
    assert bytes(second.view()) == DATA
    assert os.pread(exported, NBYTES, 0) == DATA
    first.close()
    second.close()


def test_a_segment_cannot_be_sealed_while_it_is_mapped_for_filling(writable: int) -> None:
    mapping = host.map_shared(writable, nbytes=NBYTES)
    mapping.view()[0] = 7
    with pytest.raises(BlockingIOError, match="writable mapping"):
        host.seal(writable)
    mapping.close()
    host.seal(writable)
    host.verify(writable, nbytes=NBYTES, what="segment")
    assert os.pread(writable, 1, 0) == b"\x07"


def test_a_filled_mapping_is_seen_by_others(writable: int) -> None:
    mapping = host.map_shared(writable, nbytes=NBYTES)
    mapping.view()[:4] = b"fill"
    assert os.pread(writable, 4, 0) == b"fill"
    mapping.close()


# Lifetime


def mapped() -> int:
    return len(memfd_mappings())


def test_a_view_keeps_the_mapping_and_the_memory_after_the_descriptor(sealed: int) -> None:
    fd = host.export(sealed)
    mapping = host.map_private(fd, nbytes=NBYTES)
    os.close(fd)
    part = mapping.view()[100:200]
    del mapping
    gc.collect()
    assert mapped() == 1
    assert bytes(part) == DATA[100:200]
    del part
    gc.collect()
    assert mapped() == 0


def test_the_last_reference_unmaps_without_a_close(exported: int) -> None:
    mapping = host.map_private(exported, nbytes=NBYTES)
    assert mapped() == 1
    del mapping
    assert mapped() == 0


def test_a_mapping_holds_no_descriptor(sealed: int) -> None:
    """Python's own mmap does, and would keep memory of a generation that was let go."""
    fd = host.export(sealed)
    before = open_fds()
    mapping = host.map_private(fd, nbytes=NBYTES)
    assert open_fds() == before
    os.close(fd)
    mapping.close()


def test_closing_twice_unmaps_once(exported: int) -> None:
    """The second must not unmap what another mapping has put at the same address."""
    first = host.map_private(exported, nbytes=NBYTES)
    first.close()
    second = host.map_private(exported, nbytes=NBYTES)
    first.close()
    assert first.closed
    assert not second.closed
    assert bytes(second.view()) == DATA
    second.close()


def test_a_closed_mapping_has_no_view(exported: int) -> None:
    mapping = host.map_private(exported, nbytes=NBYTES)
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.view()


def test_an_empty_segment_is_allocated_sealed_mapped_and_viewed() -> None:
    with OwnedFds([host.allocate(0, name="empty")]) as fds:
        host.seal(fds[0])
        host.verify(fds[0], nbytes=0, what="segment")
        mapping = host.map_private(fds[0], nbytes=0)
        assert bytes(mapping.view()) == b""
        mapping.close()


def kernels_account(mapping: host.Mapping) -> dict[str, str]:
    """The lines of `/proc/self/smaps` about a mapping."""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        lines = file.read().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{mapping.address:08x}-"))
    end = next(number for number, line in enumerate(lines[start:], start) if line.startswith("VmFlags:"))
    return {word: rest for word, _, rest in (line.partition(":") for line in lines[start + 1 : end + 1])}


def test_a_private_mapping_reserves_no_swap(exported: int) -> None:
    """Otherwise each engine would charge a whole shard to the commit limit: `nr`, no-reserve, is the flag in smaps."""
    mapping = host.map_private(exported, nbytes=NBYTES)
    assert "nr" in kernels_account(mapping)["VmFlags"].split()
    mapping.close()


@pytest.mark.parametrize("kernel", ["this one", "one that does not know the advice"])
def test_a_populated_mapping_is_resident_and_has_no_page_of_its_own(
    kernel: str, exported: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "this one":
        monkeypatch.setattr(host, "_MADV_POPULATE_READ", 200)
    mapping = host.map_private(exported, nbytes=NBYTES)
    assert kernels_account(mapping)["Rss"].split() == ["0", "kB"]
    mapping.populate()
    account = kernels_account(mapping)
    assert account["Rss"].split() == [str(NBYTES // 1024), "kB"]
    assert account["Anonymous"].split() == ["0", "kB"]
    mapping.close()


def virtual_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


@pytest.mark.parametrize("extra", [0, 1, mmap.PAGESIZE, host.LARGE_PAGE_NBYTES - 1])
def test_a_mapping_that_can_hold_a_large_page_begins_at_one_and_takes_no_more_room(extra: int) -> None:
    nbytes = host.LARGE_PAGE_NBYTES + extra
    with OwnedFds([host.allocate(nbytes, name="aligned")]) as fds:
        before = virtual_nbytes()
        mapping = host.map_private(fds[0], nbytes=nbytes)
        assert mapping.address % host.LARGE_PAGE_NBYTES == 0
        assert virtual_nbytes() - before == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert [mapping.view()[at] for at in (0, nbytes - 1)] == [0, 0]
        mapping.close()
        assert virtual_nbytes() == before


def test_where_address_space_is_short_the_error_says_so(exported: int) -> None:
    def map_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        with OwnedFds([host.allocate(1 << 40, name="huge")]) as fds, pytest.raises(TransferError, match="ulimit -v"):
            host.map_private(fds[0], nbytes=1 << 40)

    in_child(map_too_much)


def test_a_segment_that_cannot_be_sized_leaves_no_descriptor() -> None:
    def allocate_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        before = open_fds()
        with pytest.raises(InsufficientMemory, match=f"{1 << 21} bytes"):
            host.allocate(1 << 21, name="impossible")
        assert open_fds() == before

    in_child(allocate_too_much)


# Verifying what arrived


def test_a_sealed_segment_of_the_right_size_is_accepted(exported: int) -> None:
    host.verify(exported, nbytes=NBYTES, what="segment")


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1, 1 << 62])
def test_another_size_is_refused(exported: int, nbytes: int) -> None:
    with pytest.raises(TransferError, match="size"):
        host.verify(exported, nbytes=nbytes, what="segment 3")


@pytest.mark.parametrize("missing", ["F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE"])
def test_any_missing_seal_is_refused(writable: int, missing: str) -> None:
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, host.SEALS & ~getattr(fcntl, missing))
    with pytest.raises(TransferError, match="seals"):
        host.verify(writable, nbytes=NBYTES, what="segment")


def test_a_seal_against_future_writes_only_is_not_enough(writable: int) -> None:
    """A writable mapping may still live."""
    future = 0x10
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, (host.SEALS & ~fcntl.F_SEAL_WRITE & ~fcntl.F_SEAL_SEAL) | future)
    fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    with pytest.raises(TransferError, match="seals"):
        host.verify(writable, nbytes=NBYTES, what="segment")


def test_what_is_not_a_memfd_is_refused_and_named() -> None:
    reading, writing = os.pipe()
    near, far = socket.socketpair()
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile(dir="/dev/shm") as shared, near, far:
        file.truncate(NBYTES)
        shared.truncate(NBYTES)
        with OwnedFds([reading, writing, os.open("/", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)]) as fds:
            others = [*(fds[position] for position in range(len(fds))), near.fileno(), file.fileno(), shared.fileno()]
            for fd in others:
                with pytest.raises(TransferError, match="segment 3"):
                    host.verify(fd, nbytes=NBYTES, what="segment 3")


@pytest.mark.parametrize("mode", [os.O_PATH, os.O_WRONLY])
def test_a_descriptor_that_cannot_be_read_is_refused(sealed: int, mode: int) -> None:
    with OwnedFds([os.open(f"/proc/self/fd/{sealed}", mode)]) as fds, pytest.raises(TransferError, match="read"):
        host.verify(fds[0], nbytes=NBYTES, what="segment")


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK])
def test_a_descriptor_that_can_be_read_is_accepted(sealed: int, mode: int) -> None:
    with OwnedFds([os.open(f"/proc/self/fd/{sealed}", mode)]) as fds:
        host.verify(fds[0], nbytes=NBYTES, what="segment")
