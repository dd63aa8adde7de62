"""The control plane for whoever asks and listens; from Python, changes of live weights: all ranks or none.

    from weightcached.client.control import update, rollback, generations

    changed = update("/models/finetune-7", name="default", keep=1)     # blocks; raises, and what is served is as before
    rollback()

Each takes ``runtime_dir``, ``name``, ``timeout_s`` and ``allowed`` (whom to trust as a daemon, beside root and this
user) to say which group. ``changes.py`` and ``holding.py`` have the same as coroutines. The commands ``weightcached
update``, ``rollback``, ``generations``, ``pin``, ``unpin`` and ``drop`` are these. Events, as they happen, are
``listening.py``'s. Nothing is imported here before it is called.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcached.client.control.changes import Changed
    from weightcached.client.control.group import Group

__all__ = ["drop", "generations", "pin", "resolve", "rollback", "update"]


def update(
    model: str | os.PathLike[str],
    *,
    keep: int | None = None,
    wait: bool = False,
    force: bool = False,
    align: bool = False,
    **where: Any,
) -> Changed:
    """All ranks load ``model`` beside what they serve, and then switch. See ``changes.update``."""
    from weightcached.client.control import changes
    from weightcached.client.control.group import Where

    return asyncio.run(changes.update(Where.of(**where), model, keep=keep, wait=wait, force=force, align=align))


def rollback(
    to: str | None = None, *, wait: bool = False, force: bool = False, align: bool = False, **where: Any
) -> Changed:
    """All ranks serve a version again that they hold. See ``changes.rollback``."""
    from weightcached.client.control import changes
    from weightcached.client.control.group import Where

    return asyncio.run(changes.rollback(Where.of(**where), to, wait=wait, force=force, align=align))


def resolve(**where: Any) -> Group:
    """End what another coordinator left open or undecided. The group afterwards. See ``changes.resolve``."""
    from weightcached.client.control import changes
    from weightcached.client.control.group import Where

    group, _ = asyncio.run(changes.resolve(Where.of(**where)))
    return group


def generations(**where: Any) -> Group:
    """What every rank holds, as it says itself."""
    from weightcached.client.control.group import Where

    return asyncio.run(Where.of(**where).group())


def pin(word: str, *, pinned: bool = True, **where: Any) -> Group:
    """Keep a version or a generation, or no longer. See ``holding.pin``."""
    from weightcached.client.control import holding
    from weightcached.client.control.group import Where

    return asyncio.run(holding.pin(Where.of(**where), word, pinned=pinned))


def drop(word: str, *, force: bool = False, **where: Any) -> Group:
    """Free a version or a generation. See ``holding.drop``."""
    from weightcached.client.control import holding
    from weightcached.client.control.group import Where

    return asyncio.run(holding.drop(Where.of(**where), word, force=force))
