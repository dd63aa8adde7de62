"""Hearing what happens at many places at once, those included whose daemons start later.

Owns finding them and putting what they say into one stream. Directories are looked at once a second: no kernel event
tells of all that may appear, names' directories and the runtime directory itself included. A daemon that is started
again is found by whoever follows its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from weightcached.client.control.listening import Heard, Lost, follow
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place

_LOOK_EVERY_S = 1.0
_QUEUED_MAX = 256

Finding = Callable[[], Sequence[Place]]


async def watch(find: Finding, *, allowed: AllowList, forever: bool) -> AsyncGenerator[Heard | Lost, None]:
    """What happens at every place that ``find`` names, now or later, as it is heard. Does not end.

    ``forever``: a place is waited for however long nobody is there; else until ``find`` names it again. A place that
    cannot be listened to is said once as :class:`Lost`, and not tried again while it is the same error. Raises what
    ``find`` raises, and what following raises that is no error of a place: a bug is not tried again for ever.
    """
    said: asyncio.Queue[Heard | Lost] = asyncio.Queue(_QUEUED_MAX)  # whoever does not read makes daemons' events wait
    following: dict[Place, asyncio.Task[None]] = {}
    refused: dict[Place, str] = {}

    async def one(place: Place) -> None:
        try:
            async for heard in follow(place, allowed=allowed, until_gone=not forever):
                refused.pop(place, None)
                await said.put(heard)
        except WeightCacheError as error:
            if refused.get(place) != str(error):
                refused[place] = str(error)
                await said.put(Lost(place, error))

    async def look() -> None:
        while True:
            for task in following.values():
                if task.done():
                    task.result()
            for place in find():
                if place not in following or following[place].done():
                    following[place] = asyncio.create_task(one(place), name=f"follow {place}")
            await asyncio.sleep(_LOOK_EVERY_S)

    looking = asyncio.create_task(look(), name="look for places")
    hearing = asyncio.create_task(said.get(), name="hear")
    try:
        while True:
            await asyncio.wait({hearing, looking}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                yield hearing.result()
                hearing = asyncio.create_task(said.get(), name="hear")
            else:
                looking.result()
    finally:
        tasks = {looking, hearing, *following.values()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
