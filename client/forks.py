"""Owns what a forked child must not keep: copies of connections to daemons.

A connection is a lease, and the kernel ends it only when its last copy is closed. A child that kept one would hold the
lease of an engine that is long dead. So a child closes, before anything else runs in it, every connection that its
parent had, those of attaches in progress included. Close-on-exec does the same for children that exec.

Called by the client's other modules only.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Owner = TypeVar("_Owner")

# A fork waits while a connection is being made and noted down, so that no child has one that nobody told it about.
_guard = threading.Lock()
_in_child: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def new_connection() -> socket.socket:
    """A non-blocking, close-on-exec Unix stream socket, not connected yet, that a forked child closes."""
    with _guard:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        _in_child[connection] = socket.socket.close
    return connection


def in_child(owner: _Owner, let_go: Callable[[_Owner], None]) -> None:
    """Have ``let_go(owner)`` called in every forked child, and in children of those, while ``owner`` lives. It must not
    wait for any lock, and be safe to call again.
    """
    with _guard:
        _in_child[owner] = let_go


def _let_go() -> None:
    _guard.release()
    for owner, let_go in list(_in_child.items()):
        let_go(owner)


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_let_go)
