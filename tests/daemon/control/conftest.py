"""What the control plane's tests share: a claimed place in this process, and running something on the daemon's kind of
loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from weightcached.daemon.claim import Claim, take
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place

OnLoop = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def claim(runtime_dir: Path) -> Iterator[Claim]:
    """Of a place whose data plane listens."""
    claim = take(Place(runtime_dir, "default", "host-tp0of1"), AllowList())
    listener = claim.listen(mode=0o600)
    yield claim
    listener.close()
    claim.unlink()
    claim.release()


@pytest.fixture
def on_loop(request: pytest.FixtureRequest) -> Iterator[OnLoop]:
    """Runs a coroutine on uvloop's loop, within the time that a test has: no signal of pytest's ends that loop."""

    async def in_time(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async with asyncio.timeout(limit_s):
            return await coroutine

    limit_s = 0.8 * float(request.config.getini("timeout"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield lambda coroutine: runner.run(in_time(coroutine))
