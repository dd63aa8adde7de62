"""All ranks of one model in a run, with the engines that use them; a place by itself is a group of one.

Owns the engines' processes. Faults act through it; nothing here judges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.faults.chaos.checkpoint import Checkpoint
from tests.faults.chaos.engines import Engine, Role
from tests.faults.chaos.site import Folders, Site


class Group:
    """``sites`` are its ranks, in order; each knows its group."""

    program = "engine"

    def __init__(
        self, sites: Sequence[Site], *, model: Path, truth: Path, folders: Folders, environment: dict[str, str]
    ) -> None:
        self.name = sites[0].name
        self.sites = tuple(sites)
        self.folders = folders
        self.engines: list[Engine] = []
        self.environment = environment
        self._model = model
        self._truth = truth
        for site in sites:
            site.group = self

    @property
    def changes(self) -> bool:
        """Whether its weights are changed while it is served."""
        return False

    def add_engine(self, role: Role, random: random.Random) -> Engine:
        engine = Engine(
            self.program,
            role,
            self._engine_arguments(),
            seed=random.randrange(1 << 30),
            environment=self.environment,
            log=self.folders.logs / f"{self.name}-{role}.log",
        )
        self.engines.append(engine)
        return engine

    def _engine_arguments(self) -> list[str]:
        return [
            *("--model", str(self._model), "--runtime-dir", str(self.folders.run)),
            *("--name", self.name, "--cache-dir", str(self.folders.digests)),
            *("--truth", str(self._truth)),
        ]

    def replace(self, engine: Engine, random: random.Random) -> Engine:
        """Kill an engine and start another in its stead; returns when that one has attached."""
        engine.kill()
        self.engines.remove(engine)
        fresh = self.add_engine(engine.role, random)
        fresh.wait_attached(0)
        return fresh

    def one(self, role: Role) -> Engine:
        return next(engine for engine in self.engines if engine.role == role)

    def align(self) -> None:
        """Make the ranks one again after one of them has lost its vault: an operator's business."""

    def end(self) -> None:
        """End everything, by force where it must be."""
        for engine in self.engines:
            engine.kill()
        self.engines.clear()
        for site in self.sites:
            site.end()


class SingleGroup(Group):
    """A place by itself, whose checkpoint faults take away, stamp anew and replace."""

    def __init__(self, site: Site, checkpoint: Checkpoint, *, folders: Folders, environment: dict[str, str]) -> None:
        super().__init__(
            [site], model=checkpoint.directory, truth=checkpoint.truth, folders=folders, environment=environment
        )
        self.checkpoint = checkpoint


def checkpoint_of(site: Site) -> Checkpoint:
    """Of a place by itself."""
    if not isinstance(site.group, SingleGroup):
        raise ValueError(f"{site.label} is a rank of a group")
    return site.group.checkpoint
