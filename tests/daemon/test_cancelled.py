"""A load or a push that is cancelled between any two steps of the loop: what had arrived by then is closed.

A task that is cancelled once its result is there gets none; whoever then keeps the task keeps the descriptors in it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.generations import generation
from tests.support.resources import open_fds
from weightcached.daemon import staging
from weightcached.daemon.generation import Generation
from weightcached.daemon.progress import Lines, ProgressTracker
from weightcached.daemon.pushed import PushRequest
from weightcached.daemon.worker_process import Worker
from weightcached.protocol.aio import AsyncChannel
from weightcached.protocol.channel import Channel
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import BUCKET_MIN_NBYTES, CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Stage
from weightcached.protocol.worker_messages import KEEPER_TO_WORKER, WORKER_TO_KEEPER, Done

STEPS = 12
"""More than either takes."""
DONE = Done(manifest_nbytes=1, resident_nbytes=1, bytes_read=1, bytes_kept=1, seconds={})


def memory() -> int:
    return os.memfd_create("cancelled")


async def outcome_after(steps: int, work: Coroutine[Any, Any, OwnedFds]) -> asyncio.Task[OwnedFds]:
    """Cancelled after so many steps of the loop. What it returned all the same is closed."""
    task = asyncio.create_task(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result().close()
    return task


async def every_outcome(work: Callable[[], Coroutine[Any, Any, OwnedFds]]) -> None:
    """After each number of steps. The tasks are kept meanwhile, as a change keeps its own, and with one what it had."""
    tasks = [await outcome_after(steps, work()) for steps in range(STEPS)]
    assert {task.cancelled() for task in tasks} == {True, False}
    assert [name for name in open_fds().values() if "memfd:cancelled" in name] == []


def test_what_a_worker_has_sent() -> None:
    """Its manifest, mostly."""

    async def heard() -> OwnedFds:
        ours, theirs = socket.socketpair()
        with theirs, OwnedFds([memory()]) as manifest:
            speaker = Channel(theirs, outgoing=WORKER_TO_KEEPER, incoming=KEEPER_TO_WORKER)
            speaker.send(DONE, [manifest[0]])
            channel = AsyncChannel(ours, outgoing=KEEPER_TO_WORKER, incoming=WORKER_TO_KEEPER)
            child = SimpleNamespace(process=SimpleNamespace(wait=asyncio.Event().wait))  # one that does not end
            try:
                _, fds = await Worker(child, channel).receive(ProgressTracker(Lines()))  # type: ignore[arg-type]
            finally:
                channel.close()
        return fds

    asyncio.run(every_outcome(heard))


def test_what_a_trainer_has_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def filled(*_: object) -> Generation:
        await asyncio.sleep(0)
        return generation(memory=OwnedFds([memory()]))

    monkeypatch.setattr(staging, "load_pushed", filled)
    stage = Stage(
        client_version="0",
        name="a test",
        pid=1,
        transaction="1" * 32,
        timeout_s=60,
        bucket_nbytes=BUCKET_MIN_NBYTES,
        bucket_count=1,
    )
    request = PushRequest(
        base=generation(), stage=stage, partial=False, trusted_filesystems=(), make_room=lambda: asyncio.sleep(0, False)
    )

    async def made() -> OwnedFds:
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(ours, outgoing=DAEMON_TO_CLIENT, incoming=CLIENT_TO_DAEMON)
        record = SimpleNamespace(progress=ProgressTracker(Lines()))
        attendance = staging._Attendance(request, record, channel)  # type: ignore[arg-type]
        with theirs:
            try:
                return (await attendance.make()).memory
            finally:
                channel.close()
                await attendance.end()

    asyncio.run(every_outcome(made))
