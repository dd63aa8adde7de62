"""A group whose weights are changed: who changes them, what each version has been seen to be, what ends a change.

Owns coordinators' and trainers' processes and the book of versions. Faults act through it; what is broken with the
book is said here, everything else is judged by `invariants.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.faults.chaos.broken import Broken
from tests.faults.chaos.group import Group
from tests.faults.chaos.site import READY_S, Folders, Site
from tests.faults.chaos.variants import HEADS, PUSHED, SERVED, Variants
from tests.support.unprivileged import ROOT
from weightcached.client.control import resolve, update
from weightcached.protocol.control import RankState
from weightcached.protocol.errors import WeightCacheError

KINDS = ("update", "rollback", "push", "push the head")
KEEP = 1
"""Earlier versions that stay for rollback."""


class ChangingGroup(Group):
    """Its places serve the first of ``variants`` at their start."""

    program = "group_engine"

    def __init__(
        self, sites: Sequence[Site], variants: Variants, *, folders: Folders, environment: dict[str, str]
    ) -> None:
        model = variants.directory(SERVED[0])
        super().__init__(sites, model=model, truth=variants.truth, folders=folders, environment=environment)
        self.variants = variants
        self.labels: dict[str, str] = {}
        """Version → what every engine that had it has seen its bytes to be."""

    @property
    def changes(self) -> bool:
        return True

    @property
    def where(self) -> dict[str, Any]:
        """As the product's own functions take it."""
        return {"runtime_dir": self.folders.run, "name": self.name, "timeout_s": READY_S}

    def _engine_arguments(self) -> list[str]:
        return [*super()._engine_arguments(), "--size", str(len(self.sites))]

    def learn(self, version: str, label: str) -> None:
        """Broken (`versions`) where the same version was something else before."""
        if (known := self.labels.setdefault(version, label)) != label:
            raise Broken("versions", f"{version} was {known}, and is {label}")

    # Changing

    def states(self) -> list[RankState]:
        return [site.state() for site in self.sites]

    def current(self) -> str:
        """The version that rank 0 serves."""
        state = self.sites[0].state()
        info = state.generation(state.current)
        if info is None:
            raise Broken("state", f"{self.name} serves nothing: {state.state}")
        return info.version

    def other(self) -> str:
        """A variant to update to that is not served now, as far as is known."""
        label = self.labels.get(self.current(), "")
        return SERVED[1] if label.startswith(SERVED[0]) else SERVED[0]

    def update(self, variant: str, *, align: bool = False) -> None:
        """By the product's own function. Every rank has to serve it."""
        try:
            changed = update(self.variants.directory(variant), align=align, force=align, **self.where)
        except WeightCacheError as error:
            raise Broken("change", f"an update of {self.name} to {variant} was refused: {error!r}") from error
        if changed.away:
            raise Broken("change", f"after an update of {self.name} these were away: {changed.away}")
        self.learn(changed.version, f"{variant}+{variant}")

    def align(self) -> None:
        self.update(SERVED[0], align=True)

    def can_roll_back(self) -> bool:
        """Whether every rank holds a version that is not the one that is served."""
        states = self.states()
        current = states[0].generation(states[0].current)
        held = [{one.receipts_version for one in state.generations} for state in states]
        return current is not None and bool(set.intersection(*held) - {current.receipts_version})

    def holders(self, version: str) -> int:
        """How many ranks hold it."""
        return sum(
            any(version in (one.version, one.receipts_version) for one in state.generations) for state in self.states()
        )

    def spare(self) -> str | None:
        """A version that is held for rollback alone, on every rank."""
        states = self.states()
        for one in states[0].generations:
            same = [
                other
                for state in states
                for other in state.generations
                if one.receipts_version == other.receipts_version
            ]
            if all(other.standing == "previous" and not other.leases for other in same):
                return one.version
        return None

    @contextmanager
    def coordinator(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A `weightcached` command that changes the group, in a process of its own; killed at the end if it runs."""
        command = [*(sys.executable, "-m", "weightcached.daemon", *arguments), *self._place()]
        with self._process(command) as process:
            yield process

    @contextmanager
    def trainer(self, variant: str, *, partial: bool) -> Iterator[subprocess.Popen[str]]:
        """`trainer.py`; killed at the end if it runs."""
        command = [sys.executable, "-m", "tests.faults.chaos.trainer", "--parent-pid", str(os.getpid())]
        command += ["--variant", str(self.variants.directory(variant)), *(["--partial"] if partial else [])]
        with self._process([*command, *self._place()]) as process:
            yield process

    @contextmanager
    def change(self, kind: str, chance: random.Random) -> Iterator[subprocess.Popen[str]]:
        """Whoever makes a change of that kind, at work."""
        match kind:
            case "update":
                made = self.coordinator("update", "--model", str(self.variants.directory(self.other())))
            case "rollback":
                made = self.coordinator("rollback")
            case "push":
                made = self.trainer(chance.choice(PUSHED), partial=False)
            case _:
                made = self.trainer(chance.choice(HEADS), partial=True)
        with made as process:
            yield process

    def _place(self) -> list[str]:
        return ["--runtime-dir", str(self.folders.run), "--name", self.name]

    @contextmanager
    def _process(self, command: list[str]) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def push(self, variant: str, *, partial: bool) -> None:
        """It has to succeed."""
        before = self.labels.get(self.current())
        with self.trainer(variant, partial=partial) as trainer:
            said, errors = trainer.communicate(timeout=2 * READY_S)
        last = json.loads(said.splitlines()[-1]) if said else {}
        if last.get("event") != "published":
            raise Broken("change", f"a push to {self.name} ended with {trainer.returncode}: {said} {errors}")
        if not partial:
            self.learn(last["version"], f"{variant}+{variant}")
        elif before is not None:
            self.learn(last["version"], f"{before.partition('+')[0]}+{variant}")

    def resolve(self) -> None:
        """End what was left: nothing stands in the way of that once all ranks are there."""
        try:
            resolve(**self.where)
        except WeightCacheError as error:
            raise Broken("change", f"what was left of a change of {self.name} cannot be ended: {error!r}") from error

    def wait_change(self, rank: int, change: str, mark: int) -> None:
        """Until that rank says that its change is ``change``, or was given up: by a coordinator that has found nothing
        to change, perhaps.
        """
        self.sites[rank].records.wait(
            lambda record: record.get("message") == "change" and record.get("change") in (change, "aborted"),
            what=f"a change to be {change}",
            mark=mark,
            timeout_s=READY_S,
        )


def changing(site: Site) -> ChangingGroup:
    """The group that a rank is of."""
    if not isinstance(site.group, ChangingGroup):
        raise ValueError(f"{site.label} is not of a group that is changed")
    return site.group
