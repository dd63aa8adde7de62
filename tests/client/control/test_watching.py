"""What watching many places does with what is no error of a place."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from weightcached.client.control.watching import watch
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import Place


async def test_a_bug_in_following_one_place_is_raised_and_not_tried_again_for_ever() -> None:
    watching = watch(lambda: [cast(Place, "no place")], allowed=AllowList(), forever=True)
    with pytest.raises(AttributeError):
        await asyncio.wait_for(anext(watching), 30)
