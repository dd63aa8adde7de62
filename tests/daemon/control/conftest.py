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
def on_loop() -> Iterator[OnLoop]:
    """Runs a coroutine on uvloop's loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner.run
