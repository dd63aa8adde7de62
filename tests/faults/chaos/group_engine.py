"""An engine of all ranks of a group under chaos: one process, a weight set for each rank, one barrier for all.

    python -m tests.faults.chaos.group_engine --role hold|loop --size N --model DIR --truth FILE …

It asks rank 0 for what is current, and every other rank for that version, and compares what they are before it uses
them. ``hold`` computes without pause (each step looks at bytes of every rank, and they have to be of one variant),
follows what is published and moves it in between steps, or stays with what it has; ``loop`` attaches again and again.
What it says is as `engine.py` has it, with the variant (`variants.label`) that the bytes are of.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from tests.faults.chaos.engine import ATTACH_TIMEOUT_S, Commands, hold, loop, say
from tests.faults.chaos.variants import HEAD, Truth, label
from weightcached.client import WeightSet, attach
from weightcached.client.agreement import Standing, require_agreement
from weightcached.client.following import Follower
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.manifest import Row
from weightcached.protocol.places import host_device
from weightcached.protocol.processes import die_with_parent

_SAMPLE_ROWS = 4
_STEP_ROWS = 3
_STEP_S = 0.005
_STOP_WITHIN_S = 30.0
_PATIENCE_S = 20.0
_DECLINES = 0.2
"""How often it stays with what it has."""


class GroupEngine:
    """Does what `engine.hold` and `engine.loop` tell it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._devices = [host_device(tp_size=given.size, tp_rank=rank) for rank in range(given.size)]
        self._truth: Truth = json.loads(Path(given.truth).read_text())
        self._random = random.Random(given.seed)
        self._ranks: list[WeightSet] = []
        self._leader: Follower | None = None
        self._declined: str | None = None
        self._steps = 0
        self._stepping: threading.Thread | None = None
        self._attached = False
        self._layouts: dict[int, list[Row]] = {}

    # Attaching

    def attach(self) -> None:
        """One attach of all ranks, said with its outcome: ``daemon``, or the code of the error of a ``rank``."""
        self.let_go()
        began_s = time.monotonic()
        say("begin")
        words: dict[str, Any] = {}
        try:
            for device in self._devices:
                self._ranks.append(self._attach(device))
            require_agreement(self._standings())
        except WeightCacheError as error:
            words = {"outcome": error.code, "rank": len(self._ranks), "message": str(error)}
            self._close()
        else:
            words = {"outcome": "daemon", **self._use()}
        say("attach", **words, seconds=time.monotonic() - began_s, **self.compare(rows="some"))

    def _attach(self, device: str) -> WeightSet:
        rank = self._devices.index(device)
        return attach(
            self._given.model,
            mode="require",
            layout="fused",
            tp_size=self._given.size,
            tp_rank=rank,
            name=self._given.name,
            runtime_dir=self._given.runtime_dir,
            cache_dir=self._given.cache_dir,
            want=self._ranks[0].version if rank else "current",
            timeout_s=ATTACH_TIMEOUT_S,
            heartbeat_s=self._given.heartbeat,
            engine_name=f"chaos {self._given.role}",
        )

    def _standings(self) -> list[Standing]:
        return [
            Standing(
                rank=device,
                source=one.source,
                version=one.version,
                receipts_version=one.receipts_version,
                generation=one.generation,
                place=device,
            )
            for device, one in zip(self._devices, self._ranks, strict=True)
        ]

    def _use(self) -> dict[str, Any]:
        for one in self._ranks[1:]:
            one.barrier = self._ranks[0].barrier
        if self._given.role == "hold":
            for one in self._ranks:
                self._watch_lease(one)
            self._leader, self._declined = self._ranks[0].follow(), None
            self._attached = True
            self._stepping = threading.Thread(target=self._step_on, name="steps", daemon=True)
            self._stepping.start()
        return self._words()

    def _words(self) -> dict[str, Any]:
        first = self._ranks[0]
        return {
            "generation": first.generation,
            "generations": [one.generation for one in self._ranks],
            "versions": sorted({word for one in self._ranks for word in (one.version, one.receipts_version)}),
        }

    def _watch_lease(self, weights: WeightSet) -> None:
        if (lease := weights.lease) is not None:
            lease.on_lost(lambda reason: say("lost", reason=reason))
            lease.on_resumed(lambda detached_s: say("resumed", detached_s=detached_s))
            lease.on_stale(lambda reason, _: say("stale", reason=reason))

    def let_go(self) -> None:
        self._attached = False
        if self._stepping is not None:
            self._stepping.join()
            self._stepping = None
        self._close()

    def _close(self) -> None:
        for one in self._ranks:
            one.close()
        self._ranks, self._leader = [], None

    # Computing

    def _step_on(self) -> None:
        """Steps, as an engine's own thread makes them, until the weights are let go."""
        barrier = self._ranks[0].barrier
        chance = random.Random(self._given.seed)
        while self._attached:
            with barrier.reading("step"):
                seen = [
                    {row.name: self._variant(rank, row, weights) for row in chance.sample(self._rows(rank), _STEP_ROWS)}
                    for rank, weights in enumerate(self._ranks)
                ]
            self._steps += 1
            bodies = {variant for one in seen for name, variant in one.items() if name != HEAD}
            heads = {variant for one in seen for name, variant in one.items() if name == HEAD}
            if None in bodies | heads or len(bodies) > 1 or len(heads) > 1:
                say("torn", seen=seen, **self._words())
            time.sleep(_STEP_S)

    def _rows(self, rank: int) -> list[Row]:
        """Where everything lies: the same in every generation of a layout."""
        return self._layouts.setdefault(rank, list(self._ranks[rank].manifest))

    def _variant(self, rank: int, row: Row, weights: WeightSet) -> str | None:
        blocks = [segment.view() for segment in weights._open()]
        data = blocks[row.segment][row.offset : row.offset + row.nbytes]
        return self._truth[self._devices[rank]].get(row.name, {}).get(xxh3_128_hexdigest(data))

    def compare(self, *, rows: str) -> dict[str, Any]:
        """Hash mapped bytes of every rank, of a few rows or of all, and say what all ranks' manifests are of."""
        if not self._ranks:
            return {"compared": 0, "wrong": [], "missing": []}
        compared, wrong, missing, labels = 0, [], [], set()
        with self._ranks[0].barrier.reading("compare"):
            for rank, weights in enumerate(self._ranks):
                known, found = self._truth[self._devices[rank]], list(weights.manifest)
                missing += sorted(known.keys() ^ {row.name for row in found})
                said = {row.name: known.get(row.name, {}).get(row.digest.hex()) for row in found}
                labels.add(label(said))
                chosen = found if rows == "all" else self._random.sample(found, _SAMPLE_ROWS)
                compared += len(chosen)
                wrong += [row.name for row in chosen if self._variant(rank, row, weights) != said[row.name]]
        if len(labels) > 1 or None in labels:
            wrong.append(f"ranks are of {sorted(map(str, labels))}")
        return {"compared": compared, "wrong": wrong[:5], "missing": missing[:5], "label": next(iter(labels))}

    # Following

    def between(self) -> None:
        """Change over to what rank 0 has published, all ranks or none; or decide to stay."""
        if self._leader is None:
            return
        try:
            published = self._leader.pending()
            if published is None:
                self._declined = None
            if published is None or published.generation == self._declined:
                return
            if self._random.random() < _DECLINES:
                self._declined = published.generation
                say("declined", generation=published.generation)
                return
            self._change_over(published.generation)
        except WeightCacheError as error:
            say("not swapped", code=error.code, message=str(error))

    def _change_over(self, generation: str) -> None:
        first, *others = self._ranks
        before = self._words()
        with ExitStack() as stack:
            staged = [stack.enter_context(first.stage(generation=generation, timeout_s=_PATIENCE_S))]
            for one in others:
                staged.append(stack.enter_context(one.stage(version=staged[0].version, timeout_s=_PATIENCE_S)))
            if len({one.version for one in staged}) > 1 and len({one.receipts_version for one in staged}) > 1:
                say("not swapped", code="ranks_disagree", message=str([one.version for one in staged]))
                return
            with first.barrier.stopped(timeout_s=_STOP_WITHIN_S) as stopped:
                for each in staged:
                    each.swap(stopped)
        say("swapped", before=before, barrier_s=stopped.seconds, **self._words(), **self.compare(rows="some"))

    def check(self, command: dict[str, Any]) -> None:
        """Wait until the leases are settled, and compare."""
        for one in self._ranks:
            if one.lease is not None:
                one.lease.wait_for("connected", "stale", timeout_s=command["within_s"])
        states = {one.state for one in self._ranks}
        steps, self._steps = self._steps, 0
        say(
            "checked",
            token=command["token"],
            state="none" if not states else states.pop() if len(states) == 1 else "mixed",
            steps=steps,
            **(self._words() if self._ranks else {"generation": None, "generations": []}),
            **self.compare(rows=command["rows"]),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("hold", "loop"), required=True)
    for name in ("--model", "--name", "--runtime-dir", "--cache-dir", "--truth"):
        parser.add_argument(name, required=True)
    for name in ("--seed", "--parent-pid", "--size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--heartbeat", type=float, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent_pid)
    engine, commands = GroupEngine(given), Commands()
    if given.role == "hold":
        hold(engine, commands, between=engine.between)
    else:
        loop(engine, commands)


if __name__ == "__main__":
    main()
