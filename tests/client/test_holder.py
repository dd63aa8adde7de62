"""Watching the process whose memory an engine reads: who is ended, how fast, with what, and who is not.

Holders and engines are processes; only what is watched (a process's end) matters here, no memory of any kind. Engines
with memory are in tests/daemon/test_gpu_ipc.py.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import tiny_llama
from tests.support.fakecuda import CudaHere
from tests.support.forked import in_child
from tests.support.legacy_holder import legacy_holder
from weightcached.client import HOLDER_LOST_EXIT, holder
from weightcached.client.holder import HolderWatch, checked_policy, require_alive, require_process
from weightcached.client.transfer import Mapped, import_grant
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.errors import HolderDied, InvalidOption, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import SegmentInfo
from weightcached.protocol.testing import HonestGrant, TensorBytes, honest_grant, sealed_memory

WHERE = "/run/somewhere.sock"
BOUND_S = 10.0
"""Ten times what the docs say (protocol/memory/README.md): a busy machine is not a bug. The benchmark measures."""


@contextmanager
def held() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that waits for the end of its input, and a descriptor of it that the caller closes."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        try:
            yield process, os.pidfd_open(process.pid)
        finally:
            process.kill()


def watchers() -> list[threading.Thread]:
    """Threads of this process that watch a holder."""
    return [one for one in threading.enumerate() if one.name == "weightcached-holder"]


def ended(work: Callable[[], object], then: Callable[[], object]) -> tuple[int, str, float]:
    """Fork, call ``work``, then wait to be ended; meanwhile call ``then`` here once ``work`` has returned. The child's
    exit status, what it wrote to standard error, and the seconds from ``then`` to its end.
    """
    reading, writing = os.pipe()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writing, 2)
            sys.stderr = sys.__stderr__
            work()
            os.write(is_ready, b"!")
            select.select([], [], [], 60)
        finally:
            os._exit(1)
    os.close(writing)
    os.close(is_ready)
    os.read(ready, 1)  # or its end, where the child has ended by then
    started_s = time.monotonic()
    then()
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - started_s
    os.close(ready)
    with os.fdopen(reading, "rb") as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read().decode(), seconds


def test_an_engine_ends_with_its_holder_with_a_status_of_its_own_and_a_message() -> None:
    with held() as (process, fd):
        watches = []
        status, said, seconds = ended(
            lambda: watches.append(HolderWatch(fd, where=WHERE)),
            process.kill,
        )
        os.close(fd)
    assert status == HOLDER_LOST_EXIT == 69
    assert WHERE in said
    assert "ends with status 69" in said
    assert seconds < BOUND_S


def test_a_holder_that_is_dead_already_is_found_at_once_also_when_nobody_has_reaped_it() -> None:
    with held() as (process, fd):
        require_alive(fd, where=WHERE)
        process.kill()
        os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        with pytest.raises(HolderDied, match=WHERE):
            require_alive(fd, where=WHERE)
        kept: list[HolderWatch] = []
        status, _, _ = ended(lambda: kept.append(HolderWatch(fd, where=WHERE)), list)
        os.close(fd)
    assert status == HOLDER_LOST_EXIT


def test_an_engine_that_computes_in_python_all_the_time_is_ended_within_the_bound() -> None:
    """Its threads take turns at the interpreter's lock with the one that watches."""
    kept = []

    def busy() -> None:
        while True:
            sum(range(1000))

    def work() -> None:
        kept.append(HolderWatch(fd, where=WHERE))
        for _ in range(4):
            threading.Thread(target=busy, daemon=True).start()

    with held() as (process, fd):
        status, _, seconds = ended(work, process.kill)
        os.close(fd)
    assert status == HOLDER_LOST_EXIT
    assert seconds < BOUND_S


def test_a_standard_error_that_nobody_reads_holds_nothing_up() -> None:
    kept = []
    reading, writing = os.pipe()
    capacity_bytes = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    assert os.write(writing, bytes(capacity_bytes)) == capacity_bytes

    def work() -> None:
        os.dup2(writing, 2)
        kept.append(HolderWatch(fd, where=WHERE))

    with held() as (process, fd):
        status, _, seconds = ended(work, process.kill)
        os.close(fd)
    os.close(reading)
    os.close(writing)
    assert status == HOLDER_LOST_EXIT
    assert seconds < BOUND_S


@pytest.mark.parametrize("returns", [True, False, None])
def test_a_function_has_the_last_word_and_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: Any) -> None:
    """The process ends when it returns, when it does not within its time, and when it raises."""
    monkeypatch.setattr(holder, "LAST_WORDS_S", 0.3)
    kept = []

    def stop(reason: str) -> None:
        (tmp_path / "reason").write_text(reason)
        if returns is None:
            raise ValueError("not like this")
        while not returns:
            select.select([], [], [], 60)

    with held() as (process, fd):
        status, said, seconds = ended(lambda: kept.append(HolderWatch(fd, where=WHERE, on_lost=stop)), process.kill)
        os.close(fd)
    assert status == HOLDER_LOST_EXIT
    assert WHERE in (tmp_path / "reason").read_text()
    assert ("not like this" in said) == (returns is None)
    assert seconds < 0.3 + BOUND_S


def test_a_watch_nobody_refers_to_ends_and_gives_its_descriptor_back() -> None:
    with held() as (process, fd):
        watch = HolderWatch(fd, where=WHERE)
        [thread] = watchers()
        del watch
        gc.collect()
        thread.join(20)
        assert not thread.is_alive()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        process.kill()
        process.wait()  # and this process goes on


def test_a_forked_child_is_not_ended_and_keeps_no_descriptor() -> None:
    with held() as (process, fd):
        watch = HolderWatch(fd, where=WHERE)

        def work() -> None:
            nonlocal watch
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
            assert threading.active_count() == 1
            del watch

        in_child(work)
        require_alive(fd, where=WHERE)
        del watch
        process.kill()


def test_a_child_of_a_forked_child_closes_nothing_of_its_own() -> None:
    """What its parent has let go of is by now the number of something else."""
    with held() as (_, fd):
        watch = HolderWatch(fd, where=WHERE)

        def child() -> None:
            with open(os.devnull) as file:
                os.dup2(file.fileno(), fd)
            in_child(lambda: os.fstat(fd))

        in_child(child)
        del watch


def test_what_is_no_process_is_refused() -> None:
    reading, writing = os.pipe()
    try:
        for fd in (reading, writing):
            with pytest.raises(TransferError, match=r"not a process.*pidfd.*pipe"):
                require_process(fd, where=WHERE)
    finally:
        os.close(reading)
        os.close(writing)
    fd = os.pidfd_open(os.getpid())
    require_process(fd, where=WHERE)
    os.close(fd)


@pytest.mark.parametrize("policy", ["keep", "", None, 69])
def test_a_policy_that_is_none(policy: Any) -> None:
    with pytest.raises(InvalidOption, match="on_holder_lost"):
        checked_policy(policy)
    assert checked_policy("exit") == "exit"
    assert checked_policy(print) is print


def test_a_stopped_holder_has_not_ended() -> None:
    with held() as (process, fd):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        require_alive(fd, where=WHERE)
        os.close(fd)


# Grants of held memory


@contextmanager
def held_grant(cuda_here: CudaHere, folder: Path) -> Iterator[tuple[CacheConfig, HonestGrant, list[int], int]]:
    """The config, the grant's message, its descriptors (the manifest, the card, the holder), and the holder's pid."""
    uuid = cuda_here.fake.devices[0].uuid
    config = build_config(
        tiny_llama(folder), layout="hf", tp_size=1, tp_rank=0, memory="cuda-ipc", device=f"gpu-{uuid}"
    )
    tensors = {"w": TensorBytes("uint8", (16,), bytes(16))}
    with (
        honest_grant(tensors, config=config, receipts="1" * 64) as grant,
        legacy_holder(cuda_here.fake, 2 << 20, 5) as (process, handle),
        OwnedFds([sealed_memory(handle), os.pidfd_open(process.pid)]) as fds,
    ):
        segments = (SegmentInfo(memory="cuda-ipc", nbytes=16),)
        held = replace(grant, message=grant.message.model_copy(update={"segments": segments}))
        yield config, held, [grant.fds[0], fds[0], fds[1]], process.pid


def imported(config: CacheConfig, grant: HonestGrant, fds: list[int]) -> Mapped:
    """What a client makes of it; ``fds`` stay the caller's."""
    return import_grant(grant.message, OwnedFds([os.dup(fd) for fd in fds]), config=config, where=WHERE)


def test_a_grant_of_held_memory_is_mapped_and_watched(cuda_here: CudaHere, tmp_path: Path) -> None:
    with held_grant(cuda_here, tmp_path) as (config, grant, fds, _):
        mapped = imported(config, grant, fds)
        [segment] = mapped.segments
        assert bytes(segment.view()[:16]) == b"\5" * 16
        [watcher] = watchers()
        mapped.close()
        watcher.join(20)
        assert not watcher.is_alive()
    assert cuda_here.live() == ""


def test_a_grant_of_held_memory_without_its_holder_or_with_something_else_is_refused(
    cuda_here: CudaHere, tmp_path: Path
) -> None:
    with held_grant(cuda_here, tmp_path) as (config, grant, fds, _):
        with pytest.raises(TransferError, match="1 segments and their holder"):
            imported(config, grant, fds[:2])
        with pytest.raises(TransferError, match="not a process"):
            imported(config, grant, [*fds[:2], fds[0]])
        with pytest.raises(TransferError, match="the card of segment 0 has another size"):
            imported(config, grant, [fds[0], fds[0], fds[2]])
        assert watchers() == []
    assert cuda_here.live() == ""


def test_a_holder_that_ends_before_its_memory_is_open_is_what_is_reported(cuda_here: CudaHere, tmp_path: Path) -> None:
    """Not what the driver says to a handle that means nothing any more."""
    with held_grant(cuda_here, tmp_path) as (config, grant, fds, pid):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, fds[2], os.WEXITED | os.WNOWAIT)
        with pytest.raises(HolderDied, match=WHERE):
            imported(config, grant, fds)
        assert watchers() == []
    assert cuda_here.live() == ""
