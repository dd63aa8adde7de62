"""Memory kind ``cuda-ipc`` on a driver that needs no GPU: who holds what, what is opened, refused, left.

The holder is a process of its own where another one opens its memory, and this process where it holds some itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.fakecuda import GRANULARITY, OUT_OF_MEMORY, UNKNOWN, CudaHere
from tests.support.legacy_holder import legacy_holder
from weightcached.protocol.errors import DeviceFailed, InsufficientMemory, TransferError, UnsupportedModel
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory.cuda_ipc import CARD_NBYTES, CudaIpc, IpcMapping

NBYTES = GRANULARITY + 1000


@pytest.fixture
def kind(cuda_here: CudaHere) -> CudaIpc:
    return CudaIpc(cuda_here.fake.devices[0].uuid)


@contextmanager
def card_of_another(kind: CudaIpc, fake: object, byte: int = 5) -> Iterator[OwnedFds]:
    """A sealed card for memory full of ``byte`` that another process holds meanwhile."""
    with legacy_holder(fake, 2 * GRANULARITY, byte) as (_, handle), OwnedFds() as fds:
        fds.append(kind.allocate(NBYTES, name="test"))
        os.pwrite(fds[0], handle, 0)
        kind.seal(fds[0])
        yield fds


def test_the_keeper_makes_a_card_and_asks_no_driver(kind: CudaIpc, cuda_here: CudaHere) -> None:
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        assert os.fstat(fds[0]).st_size == CARD_NBYTES == 64
    assert cuda_here.fake.calls() == []


def test_the_holder_has_whole_pages_and_everything_goes_with_it(kind: CudaIpc, cuda_here: CudaHere) -> None:
    """Less than a page would be opened by others together with what else lies on it."""
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        held = kind.hold(fds[0], nbytes=NBYTES)
        assert held.resident_nbytes == kind.resident_nbytes(NBYTES) == 2 * GRANULARITY
        [memory] = cuda_here.fake.memory()
        assert (memory.nbytes, memory.pid, memory.kind) == (2 * GRANULARITY, os.getpid(), "legacy")
        assert os.pread(fds[0], 100, 0) != bytes(CARD_NBYTES)
        held.close()
        held.close()
    assert cuda_here.live() == ""
    assert cuda_here.fake.memory() == []


def test_memory_that_nobody_refers_to_any_more_is_given_back_before_its_context(
    kind: CudaIpc, cuda_here: CudaHere
) -> None:
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        held: IpcMapping | None = kind.hold(fds[0], nbytes=NBYTES)
        assert held is not None
    assert cuda_here.live() == "legacy=1 contexts=1"
    del held
    assert cuda_here.live() == ""


def test_what_another_process_holds_is_opened_and_given_back(kind: CudaIpc, cuda_here: CudaHere) -> None:
    with card_of_another(kind, cuda_here.fake) as fds:
        with OwnedFds([kind.export(fds[0])]) as exported:
            kind.verify(exported[0], nbytes=NBYTES, what="segment 0", read_only=True)
            opened = kind.map_private(exported[0], nbytes=NBYTES)
        assert (opened.nbytes, opened.resident_nbytes) == (NBYTES, 2 * GRANULARITY)
        assert ctypes.string_at(opened.address, NBYTES) == b"\5" * NBYTES
        assert bytes(opened.view()[3:5]) == b"\5\5"
        shown = opened.__cuda_array_interface__
        assert (shown["shape"], shown["data"]) == ((NBYTES,), (opened.address, False))
        opened.close()
        with pytest.raises(ValueError, match="closed"):
            opened.view()
    assert cuda_here.live() == ""


def test_opened_twice_in_a_process_it_is_one_place_that_stays_until_both_have_left(
    kind: CudaIpc, cuda_here: CudaHere
) -> None:
    with card_of_another(kind, cuda_here.fake) as fds:
        first, second = (kind.map_private(fds[0], nbytes=NBYTES) for _ in range(2))
        assert first.address == second.address
        first.close()
        assert ctypes.string_at(second.address, 2) == b"\5\5"
        second.close()
    assert cuda_here.live() == ""


def test_who_writes_to_it_changes_what_all_have(kind: CudaIpc, cuda_here: CudaHere) -> None:
    """The limit of this kind: nothing protects it, and nothing undoes it."""
    with card_of_another(kind, cuda_here.fake) as fds:
        one = kind.map_private(fds[0], nbytes=NBYTES)
        ctypes.memset(one.address, 7, 1)
        one.close()
        other = kind.map_private(fds[0], nbytes=NBYTES)
        assert ctypes.string_at(other.address, 2) == b"\7\5"
        with pytest.raises(UnsupportedModel, match="nothing can be undone"):
            other.revert()
        other.close()


def test_what_this_process_holds_is_mapped_as_it_is(kind: CudaIpc, cuda_here: CudaHere) -> None:
    """No driver opens a handle where it comes from: a load from disk has to come by its own memory otherwise."""
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        held = kind.hold(fds[0], nbytes=NBYTES)
        kind.seal(fds[0])
        assert kind.map_private(fds[0], nbytes=NBYTES) is held
        held.close()
        with pytest.raises(DeviceFailed, match="cuIpcOpenMemHandle"):
            kind.map_private(fds[0], nbytes=NBYTES)
    assert cuda_here.live() == ""


def test_what_is_no_card_is_refused_by_name(kind: CudaIpc) -> None:
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        with pytest.raises(TransferError, match="the card of segment 0 lacks seals"):
            kind.verify(fds[0], nbytes=NBYTES, what="segment 0")
        kind.seal(fds[0])
        with pytest.raises(TransferError, match="came open for writing"):
            kind.verify(fds[0], nbytes=NBYTES, what="segment 0", read_only=True)
        with pytest.raises(TransferError, match="blank"):
            kind.map_private(fds[0], nbytes=NBYTES)
        with pytest.raises(PermissionError):
            os.pwrite(fds[0], b"other", 0)


def test_a_card_of_a_holder_that_has_ended_opens_nothing(kind: CudaIpc, cuda_here: CudaHere) -> None:
    with card_of_another(kind, cuda_here.fake) as fds:
        fds.append(kind.export(fds[0]))
        kept = fds.take(1)
    with pytest.raises(DeviceFailed, match=r"cuIpcOpenMemHandle failed.*CUDA_ERROR_INVALID_HANDLE"):
        kind.map_private(kept, nbytes=NBYTES)
    os.close(kept)
    assert cuda_here.live() == ""


@pytest.mark.parametrize(
    ("call", "result", "error"),
    [
        ("cuDevicePrimaryCtxRetain", UNKNOWN, DeviceFailed),
        ("cuMemAlloc", UNKNOWN, DeviceFailed),
        ("cuMemAlloc", OUT_OF_MEMORY, InsufficientMemory),
        ("cuIpcGetMemHandle", UNKNOWN, DeviceFailed),
    ],
)
def test_holding_that_fails_leaves_nothing(
    kind: CudaIpc, cuda_here: CudaHere, call: str, result: int, error: type[Exception]
) -> None:
    cuda_here.fake.fail((call, 1, result))
    said = call if error is DeviceFailed else "no room"
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds, pytest.raises(error, match=said):
        kind.hold(fds[0], nbytes=NBYTES)
    assert (cuda_here.live(), cuda_here.fake.memory()) == ("", [])


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle"])
def test_opening_that_fails_leaves_nothing(kind: CudaIpc, cuda_here: CudaHere, call: str) -> None:
    with card_of_another(kind, cuda_here.fake) as fds:
        cuda_here.fake.fail((call, 1, UNKNOWN))
        with pytest.raises(DeviceFailed, match=call):
            kind.map_private(fds[0], nbytes=NBYTES)
        assert cuda_here.live() == ""


def test_a_context_is_given_back_also_where_the_memory_is_refused(kind: CudaIpc, cuda_here: CudaHere) -> None:
    with OwnedFds([kind.allocate(NBYTES, name="test")]) as fds:
        held = kind.hold(fds[0], nbytes=NBYTES)
    cuda_here.fake.fail(("cuMemFree", 1, UNKNOWN))
    with pytest.raises(DeviceFailed, match="cuMemFree"):
        held.close()
    assert cuda_here.live() == "legacy=1"
    cuda_here.reset()


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuIpcOpenMemHandle"])
def test_of_calls_that_all_fail_the_first_is_what_is_told_with_the_device(
    kind: CudaIpc, cuda_here: CudaHere, call: str
) -> None:
    with card_of_another(kind, cuda_here.fake) as fds:
        cuda_here.fake.lose(call)
        with pytest.raises(DeviceFailed, match=rf"^{call} failed.*{kind.uuid}"):
            kind.map_private(fds[0], nbytes=NBYTES)
        cuda_here.fake.found()
    cuda_here.reset()


def test_a_full_device_says_how_much_is_free_and_admits_nothing(kind: CudaIpc, cuda_here: CudaHere) -> None:
    total = cuda_here.fake.devices[0].nbytes
    assert kind.admit(total).free_nbytes == total
    with pytest.raises(InsufficientMemory, match=f"{total} bytes free"):
        kind.admit(total + 1)
    with OwnedFds([kind.allocate(1, name="test")]) as fds, pytest.raises(InsufficientMemory, match="MiB free; held by"):
        kind.hold(fds[0], nbytes=total)  # the context takes some, too
