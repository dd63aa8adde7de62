"""Swaps against real daemons: what is published is heard, staged and used; back is the same; a keeper that is killed
meanwhile is found again by the generation in use.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.checkpoints import raw_tensor, tiny_config, tiny_llama, tiny_shapes, write_safetensors
from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import TIMEOUT_S, Daemon, daemon, supervised_daemon
from tests.support.eventually import eventually
from tests.support.resources import memfd_mappings
from weightcached.client import Follower, Published, Swapped, WeightSet, attach
from weightcached.client.control import update
from weightcached.protocol.control import FromHeld
from weightcached.protocol.errors import ConfigurationError, GenerationGone
from weightcached.protocol.places import Place

Running = Callable[..., AbstractContextManager[Daemon]]


@pytest.fixture
def other(settled_model: Path, tmp_path: Path) -> Path:
    return other_weights(settled_model, tmp_path / "other")


@pytest.fixture
def served(settled_model: Path, place: Place) -> Iterator[Daemon]:
    with daemon(settled_model, place.runtime_dir) as running:
        running.wait_until("ready")
        yield running


def attached(served: Daemon, **options: object) -> WeightSet:
    asked = {"mode": "require", "runtime_dir": served.place.runtime_dir, "want": "current", **options}
    return attach(served.model_dir, **asked)  # type: ignore[arg-type]


def swapped(weights: WeightSet, *, generation: str) -> Swapped:
    with weights.stage(generation=generation) as staged, weights.barrier.stopped() as stopped:
        return staged.swap(stopped)


def leases(served: Daemon) -> dict[str, int]:
    """Generation → how many leases are of it, where there are any."""
    return {one.generation: one.leases for one in Changer(served).state().generations if one.leases}


def heard(following: Follower, weights: WeightSet) -> Published:
    """Wait for what is published. The first word may be of what is in use already."""
    while (found := following.pending()) is None:
        assert following.wait(TIMEOUT_S)
    assert found.generation != weights.generation
    return found


def test_an_update_is_heard_and_used_and_taken_back(served: Daemon, other: Path) -> None:
    changer = Changer(served)
    with attached(served) as weights:
        first, captured = weights.generation, {name: tensor.data_ptr() for name, tensor in weights.items()}
        before = {name: tensor.clone() for name, tensor in weights.items()}
        following = weights.follow()
        assert following.pending() is None
        changer.update(from_directory(other))
        found = heard(following, weights)
        assert found.drops
        done = swapped(weights, generation=found.generation)
        assert (done.from_generation, done.to_generation) == (first, found.generation)
        assert None not in (found.version, found.receipts_version)
        assert {done.to_version, found.version} <= {weights.version, found.receipts_version}
        weights.verify()
        assert any(not before[name].equal(tensor) for name, tensor in weights.items())
        assert {name: tensor.data_ptr() for name, tensor in weights.items()} == captured
        assert leases(served) == {weights.generation: 1}
        changer.update(FromHeld(version=done.from_version))
        back = heard(following, weights)
        assert back.generation == first
        swapped(weights, generation=back.generation)
        weights.verify()
        assert all(before[name].equal(tensor) for name, tensor in weights.items())
        assert len(memfd_mappings()) == 1


def test_what_engines_could_not_bind_is_not_published(served: Daemon, tmp_path: Path) -> None:
    """Both directories have the config.json of what is served, and tensors that are others."""
    before = standings(Changer(served).state())
    halves, fewer = tiny_llama(tmp_path / "halves", code="F16"), tiny_llama(tmp_path / "fewer")
    shapes = tiny_shapes(tiny_config())
    del shapes["model.norm.weight"]
    write_safetensors(fewer / "model.safetensors", {name: raw_tensor(name, shape) for name, shape in shapes.items()})
    differences = {halves: "lm_head.weight: dtype bfloat16 here, float16 there", fewer: "model.norm.weight: not there"}
    for odd, difference in differences.items():
        with pytest.raises(ConfigurationError, match="could not bind") as raised:
            update(odd, runtime_dir=served.place.runtime_dir)
        assert difference in str(raised.value)
    assert standings(Changer(served).state()) == before


def test_what_was_published_before_anybody_followed_is_asked_for(served: Daemon, other: Path) -> None:
    with attached(served) as weights:
        Changer(served).update(from_directory(other))
        found = heard(weights.follow(), weights)
        assert found.generation == served.report().generation
        with weights.stage() as staged:
            assert staged.generation == found.generation


def test_a_generation_that_nobody_ever_held_is_gone(served: Daemon) -> None:
    eventually(lambda: served.report().digest is not None)  # before, it could be what is held
    with attached(served) as weights:
        with pytest.raises(GenerationGone):
            weights.stage(version="digest:" + "0" * 64)
        assert weights.state == "connected"
        assert weights.lease is not None
        weights.lease.ping()


def test_a_stage_that_is_given_up_leaves_the_lease_with_what_is_in_use(served: Daemon, other: Path) -> None:
    with attached(served) as weights:
        Changer(served).update(from_directory(other))
        with weights.stage() as staged:
            assert leases(served) == {staged.generation: 1}
        assert weights.lease is not None
        weights.lease.ping()  # the switch back was before it
        assert leases(served) == {weights.generation: 1}


def test_a_daemon_that_is_started_anew_without_a_vault_is_followed_too(
    settled_model: Path, other: Path, place: Place
) -> None:
    """The lease is stale then, and of no use to resume: what is served is staged by a connection of its own, and the
    lease is of it once it is in use.
    """
    with daemon(settled_model, place.runtime_dir) as first:
        first.wait_until("ready")
        weights = attached(first)
        lease, following = weights.lease, weights.follow()
        assert lease is not None
        assert following.pending() is None
        first.stop(signal.SIGKILL)
        assert lease.wait_lost(TIMEOUT_S)
        eventually(lambda: lease.obstacle is not None)
    with weights, daemon(settled_model, place.runtime_dir) as anew:
        assert lease.wait_for("stale", timeout_s=TIMEOUT_S)
        assert lease.obstacle is None
        captured = {name: tensor.data_ptr() for name, tensor in weights.items()}
        before = weights.generation
        found = heard(following, weights)
        assert found.generation == anew.wait_until("ready").generation
        late = weights.follow()  # one that begins to follow now is told, too
        assert heard(late, weights) == found
        with pytest.raises(GenerationGone, match="another generation than was asked for"):
            weights.stage(generation=before)
        model_version = str(found.version)
        weights.stage(version=model_version).close()
        assert (lease.state, weights.generation) == ("stale", before)
        changer = Changer(anew)
        changer.update(from_directory(other))
        current = changer.current()
        while (found := heard(following, weights)).generation != current:
            assert following.wait(TIMEOUT_S)
        swapped(weights, generation=found.generation)
        assert lease.wait_for("connected", timeout_s=TIMEOUT_S)
        assert (lease.losses, lease.resumes, lease.obstacle, lease.reason) == (1, 1, None, None)
        eventually(lambda: leases(anew) == {found.generation: 1})
        eventually(lambda: following.pending() is None)
        changer.update(FromHeld(version=model_version))
        back = heard(following, weights)
        swapped(weights, generation=back.generation)
        lease.ping()
        assert leases(anew) == {back.generation: 1}
        weights.verify()
        assert {name: tensor.data_ptr() for name, tensor in weights.items()} == captured
        assert len(memfd_mappings()) == 1


@pytest.mark.parametrize("when", ["after the swap", "between staging and swapping"])
def test_a_killed_keeper_is_found_again_by_the_generation_in_use(
    settled_model: Path, place: Place, other: Path, when: str
) -> None:
    with supervised_daemon(settled_model, place.runtime_dir) as running:
        running.wait_until("ready")
        Changer(running).update(from_directory(other))
        with attached(running) as first, attached(running) as weights:
            (previous,) = {one.generation for one in Changer(running).state().generations} - {weights.generation}
            lease = weights.lease
            assert lease is not None
            with weights.stage(generation=previous) as staged:
                if when == "between staging and swapping":
                    running.kill_keeper()
                    assert lease.wait_lost(TIMEOUT_S)
                    assert lease.wait_for("connected", timeout_s=TIMEOUT_S)
                with weights.barrier.stopped() as stopped:
                    staged.swap(stopped)
            if when == "after the swap":
                running.kill_keeper()
                assert lease.wait_lost(TIMEOUT_S)
                assert lease.wait_for("connected", timeout_s=TIMEOUT_S)
            lease.ping()
            weights.verify()
            assert weights.generation == previous
            assert first.lease is not None
            assert first.lease.wait_for("connected", timeout_s=TIMEOUT_S)
            assert leases(running) == {first.generation: 1, previous: 1}
