"""What ``weightcached events --follow --json`` tells of changes of two real ranks, and of an engine that follows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.client.publish.test_publish import trained, where
from tests.support.checkpoints import tiny_llama
from tests.support.commanding import Changer, standings
from tests.support.daemons import REAL, TIMEOUT_S, Daemon
from tests.support.fine_tuned import fine_tuned
from tests.support.groups import group
from tests.support.unprivileged import ROOT
from weightcached.client import WeightSet, attach
from weightcached.client.control import rollback, update
from weightcached.client.publish import publish, stage
from weightcached.protocol.control import ControlEvent
from weightcached.protocol.errors import TruncatedFile

Said = dict[str, Any]

LOAD = ["resolve", "start worker", "load weights", "seal", "verify", "vault"]
PUSH = ["wait for the trainer", "start worker", "push weights", "seal", "verify", "vault"]
DONE = ["state updating", "change preparing", "change prepared", "state ready", "published", "change committed"]


class Following:
    """The command, at work. Every line has to be one event, and of a place the next after the one before."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.first: list[Said] = []
        """In the order in which they were said, the first of each place."""
        self._said: dict[str, list[Said]] = {}
        self._arrived = threading.Condition()
        self._wrong: str | None = None
        self._reader = threading.Thread(target=self._read, name="events", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                try:
                    self._take(json.loads(line))
                except (AssertionError, ValueError) as error:
                    self._wrong = self._wrong or f"{error}: {line}"
                self._arrived.notify_all()

    def _take(self, event: Said) -> None:
        assert event.pop("missed") == 0
        ControlEvent.model_validate(event)
        said = self._said.setdefault(event["place"], [])
        if not said:
            assert event["kind"] == "snapshot"
            self.first.append(event)
        else:
            assert event["kind"] != "snapshot"
            assert event["sequence"] == said[-1]["sequence"] + 1
        said.append(event)

    def until(self, rank: Daemon, wanted: Callable[[Said], bool]) -> list[Said]:
        """What was said there up to the first that is ``wanted``, none of it asked for before."""
        place, found = f"{rank.place.name}/{rank.place.device}", 0

        def look() -> bool:
            nonlocal found
            found = next((n for n, one in enumerate(self._said.get(place, []), 1) if wanted(one)), 0)
            return bool(found) or self._wrong is not None

        with self._arrived:
            came = self._arrived.wait_for(look, TIMEOUT_S)
            assert self._wrong is None, self._wrong
            assert came, self._said.get(place)
            taken, last = self._said[place][:found], self._said[place][found - 1 :]
            self._said[place] = [{"sequence": last[0]["sequence"], "kind": "taken"}, *last[1:]]
        return taken[1:] if taken[0]["kind"] == "taken" else taken

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(TIMEOUT_S) == 130
        self._reader.join(TIMEOUT_S)
        assert self._wrong is None, self._wrong


@contextmanager
def following(ranks: list[Daemon]) -> Iterator[Following]:
    """Once it has heard from every rank."""
    command = [*REAL, "events", "--follow", "--json", "--runtime-dir", str(ranks[0].place.runtime_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            now = Following(process)
            for rank in ranks:
                now.until(rank, lambda one: one["kind"] == "snapshot")
            yield now
            now.end()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events")
    return tiny_llama(folder / "model", hidden_size=32, intermediate_size=48, vocab_size=66, num_key_value_heads=2)


def change_of(event: Said) -> Said:
    change: Said | None = event["rank_state"]["change"]
    assert change is not None
    return change


def is_over(event: Said) -> bool:
    return event["kind"] == "change" and change_of(event)["state"] in ("committed", "aborted", "failed")


def is_number(sequence: int, event: Said) -> bool:
    return bool(event["sequence"] == sequence)


def course(said: list[Said]) -> list[str]:
    """Each step of a change, without progress and leases."""
    words = {"state": lambda one: one["state"], "change": lambda one: change_of(one)["state"]}
    told = [one for one in said if one["kind"] in (*words, "published", "failed", "draining")]
    return [" ".join([one["kind"], *([words[one["kind"]](one)] if one["kind"] in words else [])]) for one in told]


def require_progress(said: list[Said], stages: list[str]) -> None:
    """These stages, one after the other, between the beginning and the end of preparing, and none goes back."""
    steps = [one for one in said if one["kind"] == "progress"]
    assert [one for one in dict.fromkeys(one["stage"] for one in steps) if one != "ready"] == stages
    assert not stages or steps[-1]["stage"] == "ready"
    for before, after in pairwise(steps):
        if after["stage"] == before["stage"]:
            assert before["bytes_done"] < after["bytes_done"] <= after["bytes_total"], (before, after)
    prepared = [one["sequence"] for one in said if one["kind"] == "change" and change_of(one)["state"] != "committed"]
    assert all(prepared[0] < one["sequence"] for one in steps)
    assert all(one["sequence"] < prepared[1] for one in steps if one["stage"] != "ready")


def require_published(rank: Daemon, said: list[Said], before: str, *, held_as: str) -> str:
    """What is told is what is there: the generation that is served now, which is returned, and the one before.
    ``held_as``: how it stood once it was prepared.
    """
    [published] = [one for one in said if one["kind"] == "published"]
    state, now = Changer(rank).state(), published["rank_state"]
    assert published["generation"] == now["current"] == state.current == change_of(said[-1])["generation"]
    assert published["generation"] != before
    assert published["version"] in [
        word for one in state.generations if one.standing == "current" for word in (one.version, one.receipts_version)
    ]
    assert published["drops"] == ["prefix_cache", "kv_cache", "derived_tensors"]
    held = [(one["generation"], one["standing"]) for one in now["generations"]]
    assert held[:2] == standings(state)[:2] == [(published["generation"], "current"), (before, "previous")]
    [prepared] = [one for one in said if one["kind"] == "change" and change_of(one)["state"] == "prepared"]
    assert (prepared["generation"], change_of(prepared)["generation"]) == (before, published["generation"])
    assert (published["generation"], held_as) in [
        (one["generation"], one["standing"]) for one in prepared["rank_state"]["generations"]
    ]
    return str(published["generation"])


def lease_events(said: list[Said]) -> list[tuple[str, str]]:
    leases = [one for one in said if one["kind"].startswith("lease_")]
    assert {one["pid"] for one in leases} <= {os.getpid()}
    return [(one["kind"], one["generation"]) for one in leases]


def swap(weights: WeightSet, to: str) -> None:
    with weights.stage(generation=to) as staged, weights.barrier.stopped() as stopped:
        staged.swap(stopped)


@pytest.mark.timeout(120)
def test_changes_and_the_leases_of_an_engine_that_follows_are_told_in_order_and_once(
    model: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    other, broken = fine_tuned(model, tmp_path / "other"), tmp_path / "broken"
    shutil.copytree(model, broken)
    os.truncate(broken / "model.safetensors", (broken / "model.safetensors").stat().st_size - 10)
    with group(model, runtime_dir, scripts={0: None, 1: None}) as ranks, following(ranks) as now:
        served = [Changer(rank).current() for rank in ranks]

        def changed(stages: list[str]) -> list[str]:
            """Generations that are served now, after a change that has come about."""
            after = []
            for rank, before in zip(ranks, served, strict=True):
                said = now.until(rank, is_over)
                assert course(said) == DONE
                require_progress(said, stages)
                held_as = "prepared" if stages else "previous"  # what is rolled back to was held before
                after.append(require_published(rank, said, before, held_as=held_as))
            return after

        shard: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 0, "want": "current", "mode": "require"}
        with attach(model, runtime_dir=runtime_dir, **shard) as weights:
            now.until(ranks[0], lambda one: one["kind"] == "lease_opened" and one["generation"] == served[0])
            update(other, runtime_dir=runtime_dir, timeout_s=TIMEOUT_S)
            first, served = served, changed(LOAD)
            swap(weights, served[0])
            moved = now.until(ranks[0], lambda one: one["kind"] == "lease_closed")
            assert lease_events(moved) == [("lease_opened", served[0]), ("lease_closed", first[0])]

            rollback(runtime_dir=runtime_dir, timeout_s=TIMEOUT_S)
            second, served = served, changed([])
            assert served == first

            with pytest.raises(TruncatedFile):
                update(broken, runtime_dir=runtime_dir, timeout_s=TIMEOUT_S)
            ends = []
            for rank, current in zip(ranks, served, strict=True):
                said = [*now.until(rank, is_over), *now.until(rank, lambda one: one["kind"] == "state")]
                end = change_of(next(filter(is_over, said)))
                assert course(said) == [*DONE[:2], f"change {end['state']}", "state ready"]
                assert {one["generation"] for one in said} == {current}
                ends.append((end["state"], end["error_code"]))
            assert set(ends) <= {("failed", TruncatedFile.code), ("aborted", None)}
            assert ("failed", TruncatedFile.code) in ends

            publish(trained(model, 2.0), **where(ranks))
            served = changed(PUSH)
            now.until(ranks[1], lambda one: one["kind"] == "generation_dropped" and one["generation"] == second[1])
            swap(weights, served[0])  # the one before was kept for this engine alone
            said = now.until(ranks[0], lambda one: one["kind"] == "generation_dropped")
            assert lease_events(said) == [("lease_opened", served[0]), ("lease_closed", second[0])]
            assert said[-1]["generation"] == second[0]
        now.until(ranks[0], lambda one: one["kind"] == "lease_closed" and one["generation"] == served[0])

        with stage(**where(ranks)), following(ranks) as late:  # in the middle of a change
            for told, rank, current in zip(
                sorted(late.first, key=lambda one: str(one["place"])), ranks, served, strict=True
            ):
                assert (told["state"], told["generation"], change_of(told)["state"]) == (
                    "updating",
                    current,
                    "preparing",
                )
                assert told["stage"] in PUSH
                held = [(one["generation"], one["standing"]) for one in told["rank_state"]["generations"]]
                assert held == standings(Changer(rank).state())
                seen = now.until(rank, partial(is_number, told["sequence"]))
                assert course(seen) == DONE[:2]
