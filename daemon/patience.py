"""Asking a file system that may never answer: a network mount whose server is gone holds a thread for ever.

Owns running a function in a thread of its own that neither the event loop's end nor the process's waits for. (The
loop's own pool is joined at the end, and one hung read would keep the daemon from stopping.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """What ``function`` returns or raises. Cancelled, the thread is left to itself and its result thrown away."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - raised again by whoever awaits
            problem = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name=f"weightcached-{getattr(function, '__name__', 'wait')}", daemon=True).start()
    return await future
