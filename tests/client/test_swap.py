"""Another generation in the place of the one in use: addresses and tensors stay, only within the barrier, all or none.

The daemon is a lying one that is honest here; real ones are in `test_updates.py`.
"""

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.denied import MREMAP, Denied, deny
from tests.support.forked import in_child
from tests.support.resources import memfd_mappings, open_fds
from tests.support.swaps import SEGMENTS, N, swap
from weightcached.client import Barrier, WeightSet
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    BarrierError,
    DaemonUnreachable,
    SwapFailed,
)
from weightcached.protocol.memory import host
from weightcached.protocol.testing import (
    Gate,
    HonestGrant,
)

Attached = Callable[..., WeightSet]


def addresses(weights: WeightSet) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in weights.items()}


def test_tensors_views_arrays_and_addresses_show_the_new_generation(
    swappable: WeightSet, grants: list[HonestGrant]
) -> None:
    square = swappable["square"]
    view, array = square[3:5].T, swappable.numpy("square")
    capsule = np.from_dlpack(square[7])
    captured, before = addresses(swappable), dict(swappable.items())
    done = swap(swappable)
    assert (done.from_generation, done.to_generation) == tuple(grant.message.generation for grant in grants[:2])
    assert (done.from_version, done.to_version) == tuple(grant.message.version for grant in grants[:2])
    assert done.changed == ()
    assert 0 < done.swap_s < done.populate_s + 1
    assert addresses(swappable) == captured
    assert all(swappable[name] is tensor for name, tensor in before.items())
    for seen in (square, view, torch.from_numpy(array), torch.from_numpy(capsule), swappable["lm_head.weight"]):
        assert (seen == 2).all()
    assert (swappable["codes"] == 2).all()
    swappable.verify()


def test_the_weight_set_and_its_lease_are_of_the_new_generation(
    swappable: WeightSet, grants: list[HonestGrant]
) -> None:
    swap(swappable, version=grants[2].message.version)
    message = grants[2].message
    assert swappable.lease is not None
    assert (swappable.generation, swappable.lease.generation) == (message.generation, message.generation)
    assert (swappable.version, swappable.receipts_version) == (message.version, message.receipts_version)
    assert swappable.meta.generation == message.generation
    assert swappable.lease.ping() < 20
    assert swappable.state == "connected"


def test_a_rollback_is_a_swap_in_the_other_direction(swappable: WeightSet, grants: list[HonestGrant]) -> None:
    captured = addresses(swappable)
    for number in (1, 0, 2, 0):
        swap(swappable, generation=grants[number].message.generation)
        assert (swappable["square"] == number + 1).all()
        assert addresses(swappable) == captured
        swappable.verify()


@pytest.mark.parametrize("how", ["outside", "over", "another barrier", "another thread"])
def test_without_the_barrier_nothing_is_swapped(swappable: WeightSet, how: str) -> None:
    with swappable.stage() as staged:
        with swappable.barrier.stopped() as stopped:
            if how == "another thread":
                with ThreadPoolExecutor() as threads, pytest.raises(BarrierError, match="another thread"):
                    threads.submit(staged.swap, stopped).result(20)
        if how == "over":
            with pytest.raises(BarrierError, match="over"):
                staged.swap(stopped)
        if how == "another barrier":
            with Barrier().stopped() as foreign, pytest.raises(BarrierError, match="another barrier"):
                staged.swap(foreign)
        if how == "outside":
            for nothing in (swappable.barrier, swappable.barrier.stopped(), None):
                with pytest.raises(BarrierError, match="is no such block"):
                    staged.swap(nothing)  # type: ignore[arg-type]
    assert (swappable["square"] == 1).all()


def test_while_the_thread_that_stopped_the_others_reads_nothing_is_swapped(swappable: WeightSet) -> None:
    """As another task of its event loop may."""
    with swappable.stage() as staged, swappable.barrier.stopped() as stopped:
        with swappable.barrier.reading("a task"), pytest.raises(BarrierError, match="within it: a task"):
            staged.swap(stopped)
        assert (swappable["square"] == 1).all()
        staged.swap(stopped)
    assert (swappable["square"] == 2).all()


def test_one_barrier_serves_several_weight_sets(swappable: WeightSet) -> None:
    shared = swappable.barrier = Barrier()
    with swappable.stage() as staged, shared.stopped() as stopped:
        staged.swap(stopped)
    assert (swappable["square"] == 2).all()


Said = tuple[str, str, frozenset[float]]
"""A generation, its version, and the numbers that were read there."""


def test_every_read_of_many_threads_belongs_to_exactly_one_generation(
    swappable: WeightSet, grants: list[HonestGrant]
) -> None:
    """The one that the weight set says it has, in both segments, by every name and as every dtype. Readers whose reads
    lie in two blocks are there to show that the others would be found out: they meet a mixture sooner or later.
    """
    barrier, over, mixed = swappable.barrier, threading.Event(), threading.Event()
    whole = {
        (grant.message.generation, grant.message.version, frozenset({float(value)}))
        for value, grant in enumerate(grants, 1)
    }
    arrays = {name: swappable.numpy(name) for name in ("square", "codes")}

    def numbers(names: Iterable[str]) -> Iterator[float]:
        """All that these are, by tensor and by array, and in a product that takes its time."""
        for name in names:
            yield from swappable[name].unique().tolist()
            if name in arrays:
                yield from np.unique(arrays[name]).tolist()
            if name == "square":
                yield from (((swappable[name] @ swappable[name]).unique() / N) ** 0.5).tolist()

    def read(*blocks: Iterable[str]) -> set[Said]:
        said = set()
        while not over.is_set():
            generation, version, found = "", "", set()
            for names in blocks:
                with barrier.reading():
                    generation, version = swappable.generation, swappable.version
                    found |= {*numbers(names)}
            said.add((generation, version, frozenset(found)))
            if not said <= whole:
                mixed.set()
        return said

    with ThreadPoolExecutor(6) as threads:
        readers = [threads.submit(read, [*SEGMENTS[0], *SEGMENTS[1]]) for _ in range(4)]
        apart = [threads.submit(read, *SEGMENTS) for _ in range(2)]
        deadline = Deadline.after(60)
        try:
            for count, number in enumerate(itertools.cycle((1, 2, 0))):
                swap(swappable, generation=grants[number].message.generation)
                if count >= 300 and (mixed.is_set() or deadline.passed):
                    break
        finally:
            over.set()
        assert set().union(*(reader.result(60) for reader in readers)) == whole
        assert not set().union(*(reader.result(60) for reader in apart)) <= whole


def test_a_thousand_swaps_leave_nothing_behind(swappable: WeightSet, grants: list[HonestGrant]) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(open_fds()), len(memfd_mappings()), sum(1 for _ in maps)

    swap(swappable, generation=grants[1].message.generation)
    swap(swappable, generation=grants[0].message.generation)
    before = held()
    for number in range(1000):
        swap(swappable, generation=grants[1 - number % 2].message.generation)
    fds, mapped, maps = held()
    assert (fds, mapped) == before[:2]
    assert maps <= before[2] + 4
    assert (swappable["square"] == 1).all()


def test_what_is_staged_is_used_once(swappable: WeightSet, grants: list[HonestGrant]) -> None:
    with swappable.stage() as staged, swappable.barrier.stopped() as stopped:
        staged.swap(stopped)
        with pytest.raises(ValueError, match="already"):
            staged.swap(stopped)
    given_up = swappable.stage(generation=grants[2].message.generation)
    given_up.close()
    with swappable.barrier.stopped() as stopped, pytest.raises(ValueError, match="given up"):
        given_up.swap(stopped)
    assert (swappable["square"] == 2).all()


def test_after_close_nothing_is_staged_or_swapped(swappable: WeightSet) -> None:
    staged = swappable.stage()
    swappable.close()
    with swappable.barrier.stopped() as stopped, pytest.raises(ValueError, match="closed"):
        staged.swap(stopped)
    staged.close()
    with pytest.raises(ValueError, match="closed"):
        swappable.stage()


@pytest.mark.parametrize("number", range(8))
def test_threads_that_stage_while_another_closes_get_all_or_an_error(swappable: WeightSet, number: int) -> None:
    begun = threading.Barrier(4)

    def stage_and_swap() -> set[str]:
        found = set()
        begun.wait(20)
        for _ in range(20):
            try:
                with swappable.stage() as staged, swappable.barrier.stopped() as stopped:
                    staged.swap(stopped)
                found.add("swapped")
            except (DaemonUnreachable, ValueError) as error:
                found.add("closed" if "closed" in str(error) else f"{type(error).__name__}: {error}")
        return found

    square = swappable["square"]
    with ThreadPoolExecutor() as threads:
        staging = [threads.submit(stage_and_swap) for _ in range(3)]
        begun.wait(20)
        for _ in range(number):
            with swappable.barrier.reading():
                assert square.unique().numel() == 1
        swappable.close()
        outcomes = set().union(*(each.result(60) for each in staging))
    assert outcomes <= {"swapped", "closed"}
    assert "closed" in outcomes
    assert square.unique().numel() == 1


def test_a_forked_child_keeps_what_was_mapped_and_cannot_stage(swappable: WeightSet, grants: list[HonestGrant]) -> None:
    ready, swapped = Gate(), Gate()
    square = swappable["square"]

    def child() -> None:
        with pytest.raises(DaemonUnreachable, match="forked child"):
            swappable.stage()
        ready.open()
        swapped.wait()
        assert (square == 1).all()

    with ThreadPoolExecutor() as threads:
        forked = threads.submit(in_child, child)
        ready.wait()
        swap(swappable)
        swapped.open()
        forked.result(60)
    assert (square == 2).all()
    for gate in (ready, swapped):
        gate.close()


@pytest.mark.skipif(MREMAP is None, reason="the number of mremap on this machine is not known to the tests")
@pytest.mark.parametrize("number", range(len(SEGMENTS)))
def test_a_swap_that_the_kernel_refuses_leaves_the_generation_in_use(
    swappable: WeightSet, grants: list[HonestGrant], number: int
) -> None:
    """Where it is the second segment's, the first is taken back."""
    with swappable.stage() as staged:

        def child() -> None:
            assert staged._mapped is not None
            deny(Denied(MREMAP or 0, 0, staged._mapped.segments[number].address))
            with swappable.barrier.stopped() as stopped, pytest.raises(SwapFailed, match="are what they were"):
                staged.swap(stopped)
            assert all((tensor == 1).all() for tensor in swappable.values())
            assert swappable.generation == grants[0].message.generation
            swappable.verify()

        in_child(child)


@pytest.mark.parametrize("at", [host._move, host.Mapping.exchange, WeightSet._now], ids=lambda at: at.__qualname__)
def test_a_swap_that_a_signal_leaves_in_the_middle_lets_nobody_in(swappable: WeightSet, at: FunctionType) -> None:
    """Its exception is raised as one of these returns."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not at.__code__:
            return None
        if event == "return":
            raise KeyboardInterrupt
        return trace

    def child() -> None:
        with swappable.barrier.stopped() as stopped:
            sys.settrace(trace)
            try:
                with pytest.raises(KeyboardInterrupt):
                    staged.swap(stopped)
            finally:
                sys.settrace(None)
        for come_in in (swappable.barrier.reading, swappable.barrier.stopped):
            with pytest.raises(SwapFailed, match=r"found: KeyboardInterrupt.*end this process") as raised:
                come_in().__enter__()
            assert not raised.value.intact

    with swappable.stage() as staged:
        in_child(child)
