"""Turns: the digest of each parameter's bytes, made slab after slab in order, by whoever is there.

Owns the digests and whose turn it is. Slabs are ready out of order, and hardly anybody waits: whoever has the turn
digests what others have left behind it, too, while it is still in a cache. What the bytes are is the executor's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from weightcached.loader.destination import Output
from weightcached.loader.slabs import Slab


@dataclass(slots=True)
class _Digest:
    """The digest of one parameter's bytes, as far as it is, and what follows once the slabs before are digested."""

    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    slabs_done: int = 0
    taken: bool = False
    """Whether a thread has the turn."""
    left: dict[int, tuple[Output, ...]] = field(default_factory=dict)
    """Slab number → outputs."""


class Digests:
    """Of all parameters with bytes of their own. Thread-safe; a hasher belongs to the thread that has the turn."""

    def __init__(self, names: Iterable[str]) -> None:
        self._turn = threading.Condition()
        self._digests = {name: _Digest() for name in names}
        self._abandoned = False

    def of(self, name: str) -> bytes:
        """XXH3-128 of all that was digested of the parameter."""
        return self._digests[name].hasher.digest()

    def digest(self, slab: Slab, outputs: tuple[Output, ...], *, lasting: bool) -> None:
        """Leave the outputs to be digested after all slabs before, and take the turn if it is free.

        Outputs that are not ``lasting`` are digested when this returns, unless the execution has failed.
        """
        queue = self._digests[slab.parameter.name]
        with self._turn:
            queue.left[slab.number] = outputs
            if not queue.taken:
                self._take_turn(queue)
            while not lasting and queue.slabs_done <= slab.number and not self._abandoned:
                self._turn.wait()

    def abandon(self) -> None:
        """The execution has failed: nobody shall wait any longer."""
        with self._turn:
            self._abandoned = True
            self._turn.notify_all()

    def _take_turn(self, queue: _Digest) -> None:
        """Digest all that can be, in order. Called with the lock held; let go while bytes are looked at."""
        queue.taken = True
        while (outputs := queue.left.pop(queue.slabs_done, None)) is not None:
            self._turn.release()
            try:
                for output in outputs:
                    self._digests[output.name].hasher.update(output.data)
                    if output.room is not None:
                        output.room.digested()
            finally:
                self._turn.acquire()
            queue.slabs_done += 1
            self._turn.notify_all()
        queue.taken = False
