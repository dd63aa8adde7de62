"""What one rank holds, and how two holders differ. Pure, but for the hashing of our own tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from weightcached.client import WeightSet


@dataclass(frozen=True, slots=True)
class Held:
    """What is held under a name. ``names`` are all names of the same memory: tied parameters have several."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """Over the elements in C order."""
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One name's: ``what`` is a field of :class:`Held`, or ``name`` where one side has none of that name."""

    name: str
    what: str
    engine: object
    ours: object

    def __str__(self) -> str:
        return f"{self.name}: {self.what}: engine {self.engine}, ours {self.ours}"


def differences(engine: Mapping[str, Held], ours: Mapping[str, Held]) -> list[Difference]:
    """Everything that differs, by name. Bytes of different shapes or dtypes are not worth a line of their own.

    An engine's modules hold each other, so it knows a layer's parameters under more names than one. It is enough that
    we have one of them: a module that shares its parameters binds all. Names that are tied across layers we must have.
    """
    return [found for name in sorted(engine.keys() | ours.keys()) for found in _of(name, engine, ours)]


def _of(name: str, engine: Mapping[str, Held], ours: Mapping[str, Held]) -> Iterator[Difference]:
    theirs, mine = engine.get(name), ours.get(name)
    if theirs is not None and mine is None and any(_is_wiring(name, other) for other in theirs.names if other in ours):
        return
    if theirs is None or mine is None:
        yield Difference(name, "name", _presence(theirs), _presence(mine))
        return
    for field in fields(Held):
        a, b = getattr(theirs, field.name), getattr(mine, field.name)
        if field.name == "names":
            a = tuple(other for other in theirs.names if other in mine.names or not _is_wiring(other, name))
        if a != b and not (field.name == "sha256" and (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype)):
            yield Difference(name, field.name, a, b)


def _is_wiring(name: str, other: str) -> bool:
    """Whether both are names of one layer: ``…layers.0.mlp.gate.weight`` and ``…layers.0.mlp.experts.gate.weight``."""
    return (layer := re.match(r".*?\.\d+\.", name)) is not None and other.startswith(layer[0])


def _presence(held: Held | None) -> str:
    return "has none" if held is None else f"{held.dtype}{list(held.shape)}"


def held_by(weights: WeightSet) -> dict[str, Held]:
    """What ``weights`` hold."""
    import torch

    names: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        names.setdefault(id(tensor), []).append(name)
    return {
        name: Held(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            sha256=hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest(),
            names=tuple(sorted(names[id(tensor)])),
        )
        for name, tensor in weights.items()
    }
