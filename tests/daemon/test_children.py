"""Helper processes of the keeper that are to answer: each end that is no answer is an error of the right kind."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from weightcached.daemon.children import Child
from weightcached.daemon.worker_process import TransientFailure, started_worker
from weightcached.protocol.errors import ContractError, EngineFailed, TruncatedFile, WeightCacheError, WorkerDied

REPORT = "import json; print(json.dumps({'error': TruncatedFile('short', where='x').as_fields()}))"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("program", "or_else", "kind", "why"),
    [
        (KILLED, None, WorkerDied, "killed by SIGKILL"),
        ("print('{', end='', flush=True); " + KILLED, None, WorkerDied, "killed by SIGKILL"),
        (KILLED, EngineFailed, EngineFailed, "killed by SIGKILL"),
        ("sys.exit(3)", None, ContractError, "exit status 3"),
        ("print([])", None, ContractError, "exit status 0"),
        ("print('no JSON'); print('last', file=sys.stderr)", None, ContractError, "no JSON"),
        (REPORT, EngineFailed, TruncatedFile, "short"),
    ],
)
def test_whoever_gives_no_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    or_else: type[WeightCacheError] | None,
    kind: type[WeightCacheError],
    why: str,
) -> None:
    lines = ["import os, signal, sys", "from weightcached.protocol.errors import TruncatedFile", program]
    (tmp_path / "helper_of_a_test.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def ask() -> None:
        child = await Child.start("odd", "helper_of_a_test", [], answers=True)
        try:
            with pytest.raises(kind, match=why) as raised:
                await child.answer(or_else=or_else)
            assert type(raised.value) is kind
        finally:
            await child.end()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process gets so many more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open(os.devnull, os.O_RDONLY)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_where_the_system_has_none_to_give() -> None:
    """As it may be for a moment only: a load is tried again."""

    async def ask() -> None:
        with descriptors_left(1), pytest.raises(WorkerDied, match="odd process cannot be started"):
            await Child.start("odd", "helper_of_a_test", [], answers=True)
        with descriptors_left(3), pytest.raises(TransientFailure, match="worker process cannot be started"):
            async with started_worker():
                pass

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
