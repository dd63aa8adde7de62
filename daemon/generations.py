"""What is held: the generation that is current, those before it, and the one that a change has prepared.

Owns which of them is granted, which are pinned, and which may be freed, as one value that others ask; it frees nothing
and writes nothing (``freeing.py``, ``change_custody.py`` do). Lives on the event loop's thread. Each generation is
immutable; what becomes known about one (:meth:`Generations.learn`) makes another object in its place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from weightcached.daemon.digesting import Digesting
from weightcached.daemon.generation import Generation
from weightcached.daemon.proof import ProvenReceipts
from weightcached.protocol.messages import Standing


@dataclass(frozen=True, kw_only=True)
class Published:
    """A generation with what belongs to it alone."""

    generation: Generation
    proven: ProvenReceipts
    digesting: Digesting
    unproven: str | None = None
    """Why the files on disk were not seen to be what is served; ``None`` where they were."""
    staged: bool = False
    """It was never served: a change has made it, and it is granted to nobody."""
    adopted: bool = False
    """It came back from the vault, and was not made by this keeper."""
    since_s: float = field(default_factory=time.monotonic)


class Generations:
    """In the order in which they were served. Adopted ones that are not current stay ``grace_s``, for engines to
    resume.
    """

    def __init__(self, *, keep: int, grace_s: float) -> None:
        self._held: dict[str, Published] = {}
        self._current: str | None = None
        self._until_s: dict[str, float] = {}
        self._grace_s = grace_s
        self.prepared: str | None = None
        """The one that waits for a decision."""
        self.pins: set[str] = set()
        self.keep = keep
        """How many versions besides the current one are kept for rollback."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def current(self) -> Published | None:
        """What is granted to whoever asks for no other."""
        return None if self._current is None else self._held[self._current]

    @property
    def previous(self) -> list[Published]:
        """Those that were served before, the oldest first."""
        return [one for id_, one in self._held.items() if id_ != self._current and not one.staged]

    @property
    def granted(self) -> list[Published]:
        """All that may be granted: the current one, then the others, the newest first."""
        current = self.current
        return ([] if current is None else [current]) + self.previous[::-1]

    @property
    def all(self) -> list[Published]:
        """As ``granted``, and what was never served after that."""
        return self.granted + [one for one in self._held.values() if one.staged]

    def get(self, generation_id: str) -> Published | None:
        """That generation, if it is held."""
        return self._held.get(generation_id)

    def served(self, generation_id: str) -> Published | None:
        """That generation, if it is held and may be granted."""
        found = self._held.get(generation_id)
        return None if found is None or found.staged else found

    def of_version(self, version: str) -> Published | None:
        """The newest that may be granted and has this version, by either of its two words."""
        return next((one for one in self.granted if is_version(one.generation, version)), None)

    def is_current(self, generation_id: str) -> bool:
        return generation_id == self._current

    def standing(self, generation_id: str) -> Standing:
        """One that was served before is ``previous`` also while a rollback to it waits for a decision."""
        if self.is_current(generation_id):
            return "current"
        held = self._held.get(generation_id)
        return "prepared" if held is not None and held.staged else "previous"

    def add(self, published: Published) -> None:
        """Hold another one, as the newest."""
        self._held[published.generation.id] = published

    def make_current(self, generation_id: str) -> None:
        """It is what is granted from now on, and the newest."""
        self._held[generation_id] = dataclasses.replace(self._held.pop(generation_id), staged=False)
        self._current = generation_id
        self._until_s.pop(generation_id, None)

    def learn(self, generation_id: str, **changes: object) -> Published | None:
        """More is known about one; as it is now, or ``None`` where it is held no more."""
        found = self._held.get(generation_id)
        if found is not None:
            found = self._held[generation_id] = dataclasses.replace(found, **changes)  # type: ignore[arg-type]
        return found

    def remove(self, generation_id: str) -> Published | None:
        """Hold it no longer: it is granted to nobody from now on. Its memory is the caller's to close."""
        self.pins.discard(generation_id)
        self._until_s.pop(generation_id, None)
        if generation_id == self._current:
            self._current = None
        return self._held.pop(generation_id, None)

    async def free(self) -> None:
        """Give back the memory of all: nobody is granted anything any more. Safe to call twice."""
        held = list(self._held.values())
        for one in held:
            one.generation.memory.close()
        for one in held:
            await one.generation.free()

    # Pins, and what may be freed

    def give_grace(self, generation_id: str) -> None:
        """Engines that hold it get time to say so."""
        self._until_s[generation_id] = time.monotonic() + self._grace_s

    def end_grace(self, generation_id: str) -> None:
        """Nobody gets more time."""
        self._until_s.pop(generation_id, None)

    def pinned_for_s(self, generation_id: str) -> float | None:
        """How long a pin that ends by itself still holds it."""
        left_s = self._until_s.get(generation_id, 0.0) - time.monotonic()
        return left_s if left_s > 0 else None

    def is_pinned(self, generation_id: str) -> bool:
        return generation_id in self.pins or self.pinned_for_s(generation_id) is not None

    def outdated_pins(self) -> dict[str, str]:
        """Pinned generations → the newest of the same version, where that is another: a version is pinned, and one of
        it is enough.
        """
        found = {}
        for id_ in self.pins:
            pinned = self._held[id_].generation
            newest = next((one.generation.id for one in self.granted if _same_version(one.generation, pinned)), id_)
            if newest != id_:
                found[id_] = newest
        return found

    def next_end_of_grace_s(self) -> float | None:
        """How long until the next pin ends by itself."""
        return min((left for id_ in self._until_s if (left := self.pinned_for_s(id_)) is not None), default=None)

    def to_free(self, leased: Collection[str]) -> list[str]:
        """Those that nothing holds and that are not kept for rollback either, the oldest first.

        A version that is served or kept anyway is not kept twice: an update to what is served already leaves what can
        be rolled back to where it was.
        """
        current = self.current
        served = [] if current is None else [current.generation]
        kept: list[Generation] = []
        beyond: list[str] = []
        for one in reversed(self.previous):
            again = any(_same_version(one.generation, other) for other in served + kept)
            if again or len(kept) == self.keep:
                beyond.append(one.generation.id)
            else:
                kept.append(one.generation)
        return [id_ for id_ in reversed(beyond) if not self._is_held(id_, leased)]

    def spare(self, leased: Collection[str]) -> list[str]:
        """Those that are merely kept for rollback, the oldest first: what room can be made of."""
        return [one.generation.id for one in self.previous if not self._is_held(one.generation.id, leased)]

    def _is_held(self, generation_id: str, leased: Collection[str]) -> bool:
        return generation_id in leased or generation_id == self.prepared or self.is_pinned(generation_id)


def _same_version(one: Generation, other: Generation) -> bool:
    return is_version(one, other.version) or is_version(one, other.receipts_version)


def is_version(generation: Generation, version: str) -> bool:
    """Whether ``version`` is either of the two words by which ranks compare it."""
    return version in (generation.version, generation.receipts_version)
