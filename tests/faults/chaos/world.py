"""Everything of one run: folders, sites, the hostile client. Owns setting it up and clearing it away.

The digest cache lies on a tiny file system of its own where that can be had (root), so that it can be filled.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.faults.chaos import processes
from tests.faults.chaos.changing import KEEP, ChangingGroup
from tests.faults.chaos.checkpoint import Checkpoint
from tests.faults.chaos.engines import ROLES
from tests.faults.chaos.figures import Figures
from tests.faults.chaos.group import Group, SingleGroup
from tests.faults.chaos.path_watch import PathWatch
from tests.faults.chaos.site import Folders, Site
from tests.faults.chaos.variants import SERVED, Variants
from tests.support.unprivileged import ROOT

PAIR = "pair"
RANKS = 2
GRACE_S = 1.0
"""For which what came back with a keeper stays, beside what is kept for rollback."""
GROUPS = ("one", "two", PAIR)
"""Two places by themselves, and a group of two ranks that is changed."""
_SHAPES = {
    "one": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 4000},
    "two": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1000},
}
DIGESTS_TMPFS = "WEIGHTCACHED_CHAOS_DIGESTS"
"""Names a tiny file system that is ours alone; `__main__` makes it."""


class World:
    """A context manager: what is in it runs until its end, and then nothing of it is left."""

    def __init__(
        self,
        random: random.Random,
        *,
        keeper: Sequence[str] = ("serve",),
        hostile: bool = True,
        groups: Sequence[str] = GROUPS,
    ) -> None:
        self.random = random
        self.figures = Figures()
        self.forked: set[int] = set()
        """Children of dead engines that still map weights."""
        self.memory_nbytes = 0
        """Held when nothing had happened yet."""
        self.mark = secrets.token_hex(8)
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        self.environment = {**os.environ, processes.MARK: self.mark, "PYTHONPATH": os.pathsep.join(paths)}
        self.digests_tmpfs = os.environ.get(DIGESTS_TMPFS)
        self.watch = PathWatch()
        self.sites: list[Site] = []
        self.groups: list[Group] = []
        self._names = tuple(groups)
        self._keeper = tuple(keeper)
        self._with_hostile = hostile
        self._hostile: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> World:
        self._folder = tempfile.TemporaryDirectory(prefix="wc-chaos-", dir="/tmp")
        root = Path(self._folder.name)
        self.folders = Folders(
            root / "run", Path(self.digests_tmpfs or root / "digests"), root / "notify", root / "logs"
        )
        for folder in (self.folders.run, self.folders.notify, self.folders.logs, self.folders.digests):
            folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def start(self) -> None:
        """Write the checkpoints, and have daemons serve them."""
        self.groups += [self._changing(name) if name == PAIR else self._single(name) for name in self._names]
        self.sites += [site for group in self.groups for site in group.sites]
        for site in self.sites:
            site.launch()
        for site in self.sites:
            site.wait_listening()
            site.wait_ready(0)
            self.watch.add(site.place.socket_path)

    def _single(self, name: str) -> SingleGroup:
        checkpoint = Checkpoint(Path(self._folder.name) / f"model-{name}", **_SHAPES[name])
        site = Site(name, checkpoint.directory, self.folders, keeper=self._keeper, environment=self.environment)
        return SingleGroup(site, checkpoint, folders=self.folders, environment=self.environment)

    def _changing(self, name: str) -> ChangingGroup:
        variants = Variants(Path(self._folder.name) / f"models-{name}", size=RANKS)
        sites = [
            Site(
                name,
                variants.directory(SERVED[0]),
                self.folders,
                keeper=self._keeper,
                environment=self.environment,
                rank=rank,
                size=RANKS,
                options=("--layout", "fused", "--keep-generations", str(KEEP), "--adoption-grace", str(GRACE_S)),
            )
            for rank in range(RANKS)
        ]
        return ChangingGroup(sites, variants, folders=self.folders, environment=self.environment)

    def populate(self) -> None:
        """Start the engines, and whoever is hostile."""
        for group in self.groups:
            for role in ROLES:
                group.add_engine(role, self.random)
        for group in self.groups:
            for engine in group.engines:
                engine.wait_attached(0)
        if self._with_hostile:
            sockets = [str(site.place.socket_path) for site in self.sites]
            self._hostile = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.faults.chaos.hostile",
                    "--parent-pid",
                    str(os.getpid()),
                    "--seed",
                    str(self.random.randrange(1 << 30)),
                    *sockets,
                ],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
            )

    @property
    def hostile_pid(self) -> int | None:
        return None if self._hostile is None else self._hostile.pid

    def hold_hostile(self, number: signal.Signals) -> None:
        if self._hostile is not None:
            self._hostile.send_signal(number)

    def depopulate(self) -> None:
        for group in self.groups:
            for engine in group.engines:
                engine.kill()
            group.engines.clear()
        if self._hostile is not None:
            self._hostile.kill()
            self._hostile.wait()
            if self._hostile.stdin is not None:
                self._hostile.stdin.close()
            self._hostile = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depopulate()
        for group in self.groups:
            group.end()
        for pid in processes.marked(self.mark):  # what should not be there; whoever minds has said so
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.watch.close()
        self._folder.cleanup()
