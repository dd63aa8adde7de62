"""Another generation in the place of the one in use: addresses and tensors stay, only within the barrier, all or none.

The daemon is a lying one that is honest here; real ones are in `test_updates.py`.
"""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.denied import MREMAP, Denied, deny
from tests.support.forked import in_child
from tests.support.resources import memfd_mappings, open_fds
from weightcached.client import Barrier, Swapped, WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import (
    BarrierError,
    DaemonNotReady,
    DaemonUnreachable,
    GenerationGone,
    InvalidOption,
    SwapFailed,
    SwapRefused,
    TransferError,
)
from weightcached.protocol.messages import Event, Resume, Switch
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    AnswerPings,
    AnswerSwitches,
    Close,
    Gate,
    HonestGrant,
    LyingDaemon,
    Open,
    Receive,
    Send,
    Stall,
    Step,
    TensorBytes,
    honest_grant,
)

Attached = Callable[..., WeightSet]
N = 64
TIED = {"lm_head.weight": "square"}


def tensors(value: int) -> dict[str, TensorBytes]:
    """A generation whose numbers are all ``value``: a matrix, and one of each kind of odd tensor."""
    filled = np.full(N * N, value, np.float32).tobytes()
    return {
        "square": TensorBytes("float32", (N, N), filled),
        "other": TensorBytes(
            "bfloat16", (2, 2048), torch.full((4096,), value).bfloat16().view(torch.uint8).numpy().tobytes()
        ),
        "empty": TensorBytes("float16", (0, 4), b""),
        "codes": TensorBytes("uint8", (5000,), bytes([value]) * 5000),
    }


@contextmanager
def generations(config: CacheConfig, *values: int) -> Iterator[list[HonestGrant]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(honest_grant(tensors(value), config=config, receipts=f"{value}" * 64, aliases=TIED))
            for value in values
        ]


@pytest.fixture
def grants(config: CacheConfig) -> Iterator[list[HonestGrant]]:
    with generations(config, 1, 2, 3) as made:
        yield made


@pytest.fixture
def weights(grants: list[HonestGrant], place: Place, attached: Attached) -> Iterator[WeightSet]:
    """Generation 1, from a daemon that has three and grants the second now."""
    script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches(grants, current=grants[1])]
    with LyingDaemon(place.socket_path, script), attached() as weights:
        yield weights


def swap(weights: WeightSet, *, generation: str | None = None, version: str | None = None) -> Swapped:
    with weights.stage(generation=generation, version=version) as staged, weights.barrier.stopped() as stopped:
        return staged.swap(stopped)


def addresses(weights: WeightSet) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in weights.items()}


def test_tensors_views_arrays_and_addresses_show_the_new_generation(
    weights: WeightSet, grants: list[HonestGrant]
) -> None:
    square = weights["square"]
    view, array = square[3:5].T, weights.numpy("square")
    capsule = np.from_dlpack(square[7])
    captured, before = addresses(weights), dict(weights.items())
    done = swap(weights)
    assert (done.from_generation, done.to_generation) == tuple(grant.message.generation for grant in grants[:2])
    assert (done.from_version, done.to_version) == tuple(grant.message.version for grant in grants[:2])
    assert done.changed == ()
    assert 0 < done.swap_s < done.populate_s + 1
    assert addresses(weights) == captured
    assert all(weights[name] is tensor for name, tensor in before.items())
    for seen in (square, view, torch.from_numpy(array), torch.from_numpy(capsule), weights["lm_head.weight"]):
        assert (seen == 2).all()
    assert (weights["codes"] == 2).all()
    weights.verify()


def test_the_weight_set_and_its_lease_are_of_the_new_generation(weights: WeightSet, grants: list[HonestGrant]) -> None:
    swap(weights, version=grants[2].message.version)
    message = grants[2].message
    assert weights.lease is not None
    assert (weights.generation, weights.lease.generation) == (message.generation, message.generation)
    assert (weights.version, weights.receipts_version) == (message.version, message.receipts_version)
    assert weights.meta.generation == message.generation
    assert weights.lease.ping() < 20
    assert weights.state == "connected"


def test_a_rollback_is_a_swap_in_the_other_direction(weights: WeightSet, grants: list[HonestGrant]) -> None:
    captured = addresses(weights)
    for number in (1, 0, 2, 0):
        swap(weights, generation=grants[number].message.generation)
        assert (weights["square"] == number + 1).all()
        assert addresses(weights) == captured
        weights.verify()


@pytest.mark.parametrize("how", ["outside", "over", "another barrier", "another thread"])
def test_without_the_barrier_nothing_is_swapped(weights: WeightSet, how: str) -> None:
    with weights.stage() as staged:
        with weights.barrier.stopped() as stopped:
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
            with pytest.raises(AttributeError):
                staged.swap(weights.barrier)  # type: ignore[arg-type]
    assert (weights["square"] == 1).all()


def test_one_barrier_serves_several_weight_sets(weights: WeightSet) -> None:
    shared = weights.barrier = Barrier()
    with weights.stage() as staged, shared.stopped() as stopped:
        staged.swap(stopped)
    assert (weights["square"] == 2).all()


def test_every_read_of_many_threads_belongs_to_exactly_one_generation(
    weights: WeightSet, grants: list[HonestGrant]
) -> None:
    square, array, over = weights["square"], weights.numpy("square"), threading.Event()
    barrier = weights.barrier

    def read(product: Callable[[], float]) -> set[float]:
        found = set()
        while not over.is_set():
            with barrier.reading():
                found.add(product())
        return found

    def by_torch() -> float:
        product = square @ square
        low, high = product.aminmax()
        assert low == high, "a torn product"
        return float(low)

    def by_numpy() -> float:
        product = array @ array
        assert product.min() == product.max(), "a torn product"
        return float(product[0, 0])

    with ThreadPoolExecutor(6) as threads:
        readers = [threads.submit(read, product) for product in (by_torch, by_numpy) * 3]
        try:
            for number in itertools.islice(itertools.cycle((1, 2, 0)), 60):
                swap(weights, generation=grants[number].message.generation)
        finally:
            over.set()
        found = set().union(*(reader.result(60) for reader in readers))
    assert found <= {N * float(value * value) for value in (1, 2, 3)}
    assert len(found) > 1


def test_a_thousand_swaps_leave_nothing_behind(weights: WeightSet, grants: list[HonestGrant]) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(open_fds()), len(memfd_mappings()), sum(1 for _ in maps)

    swap(weights, generation=grants[1].message.generation)
    swap(weights, generation=grants[0].message.generation)
    before = held()
    for number in range(1000):
        swap(weights, generation=grants[1 - number % 2].message.generation)
    fds, mapped, maps = held()
    assert (fds, mapped) == before[:2]
    assert maps <= before[2] + 4
    assert (weights["square"] == 1).all()


def test_a_generation_that_is_gone_is_refused_and_nothing_changes(
    weights: WeightSet, grants: list[HonestGrant]
) -> None:
    with pytest.raises(GenerationGone, match="not held here"):
        weights.stage(generation="f" * 32)
    assert weights.generation == grants[0].message.generation
    assert weights.state == "connected"
    swap(weights)


def test_what_is_staged_is_used_once(weights: WeightSet, grants: list[HonestGrant]) -> None:
    with weights.stage() as staged, weights.barrier.stopped() as stopped:
        staged.swap(stopped)
        with pytest.raises(ValueError, match="already"):
            staged.swap(stopped)
    given_up = weights.stage(generation=grants[2].message.generation)
    given_up.close()
    with weights.barrier.stopped() as stopped, pytest.raises(ValueError, match="given up"):
        given_up.swap(stopped)
    assert (weights["square"] == 2).all()


def test_a_stage_that_is_given_up_switches_the_lease_back(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches(grants, current=grants[1])]
    with LyingDaemon(place.socket_path, script) as daemon, attached() as weights:
        weights.stage().close()
        assert weights.lease is not None
        weights.lease.ping()
        assert daemon.wires[0].messages[1:3] == [
            Switch(generation=None, version=None),
            Switch(generation=grants[0].message.generation, version=None),
        ]
        assert len(memfd_mappings()) == 1


def test_another_layout_is_refused_naming_what_differs(
    config: CacheConfig, grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    odd = {
        **tensors(2),
        "square": TensorBytes("int32", (N, N), bytes(4 * N * N)),
        "more": TensorBytes("uint8", (1,), b"1"),
    }
    del odd["codes"]
    with honest_grant(odd, config=config, receipts="2" * 64, aliases=TIED) as other:
        script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches([grants[0]], current=other)]
        with LyingDaemon(place.socket_path, script), attached() as weights:
            with pytest.raises(SwapRefused) as raised:
                weights.stage()
            assert "5 differences of layout" in str(raised.value)
            found = str(raised.value.found)
            assert "square: dtype float32 here, int32 there" in found
            assert "lm_head.weight: dtype float32 here, int32 there" in found
            assert "codes: not there" in found
            assert "more: not here" in found
            assert "segments of" in found
            assert (weights["square"] == 1).all()


def test_many_differences_are_counted_and_the_first_named(
    config: CacheConfig, place: Place, attached: Attached
) -> None:
    def numbered(first: int) -> dict[str, TensorBytes]:
        return {f"t{number}": TensorBytes("uint8", (1,), b"1") for number in range(first, first + 20)}

    with (
        honest_grant(numbered(0), config=config, receipts="1" * 64) as first,
        honest_grant(numbered(20), config=config, receipts="2" * 64) as second,
    ):
        script: list[Step] = [Receive(), first.step(), AnswerSwitches([first], current=second)]
        with (
            LyingDaemon(place.socket_path, script),
            attached() as weights,
            pytest.raises(SwapRefused, match=r"40 differences.*t0: not there;.*t7: not there; and 32 more"),
        ):
            weights.stage()


def test_another_config_is_refused_by_the_fields_that_differ(
    config: CacheConfig, grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    other = config.model_copy(update={"model": {**config.model, "rope_theta": 7.0}})
    with honest_grant(tensors(2), config=other, receipts="2" * 64, aliases=TIED) as changed:
        script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches([grants[0]], current=changed)]
        with (
            LyingDaemon(place.socket_path, script),
            attached() as weights,
            pytest.raises(SwapRefused, match=r"rope_theta.*7\.0 there"),
        ):
            weights.stage()


def test_a_grant_that_lies_is_an_error_and_the_weights_stay(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    lie = replace(grants[1], message=grants[1].message.model_copy(update={"manifest_sha256": "0" * 64}))
    script: list[Step] = [Receive(), grants[0].step(), AnswerSwitches([grants[0]], current=lie)]
    with LyingDaemon(place.socket_path, script), attached() as weights:
        with pytest.raises(TransferError, match="not the one that was granted"):
            weights.stage()
        assert (weights["square"] == 1).all()
        assert weights.lease is not None
        weights.lease.ping()


@pytest.mark.parametrize("policy", ["refuse", "discard"])
def test_parameters_that_were_written_to_are_named(weights: WeightSet, policy: str) -> None:
    weights["square"][2, 2] = 7
    weights["codes"][4999] = weights["codes"][4999]  # a page of its own with the same bytes is no change
    with weights.stage() as staged:
        assert staged.changed == ("square",)
        if policy == "refuse":
            with weights.barrier.stopped() as stopped, pytest.raises(SwapRefused, match=r"written to 1 param.*square"):
                staged.swap(stopped)
            assert weights["square"][2, 2] == 7
            weights.revert()
    if policy == "refuse":
        swap(weights)
        assert (weights["square"] == 2).all()
    else:
        with weights.stage() as staged, weights.barrier.stopped() as stopped:
            done = staged.swap(stopped, changed="discard")
        assert done.changed == ("square",)
        assert (weights["square"] == 2).all()


def test_what_is_written_after_staging_is_told_when_the_barrier_is_left(
    weights: WeightSet, log: pytest.LogCaptureFixture
) -> None:
    with weights.stage() as staged:
        weights["other"][1, 1] = 7
        with weights.barrier.stopped() as stopped:
            done = staged.swap(stopped)
            assert not done.changed
        assert list(done.changed) == ["other"]
    assert "discarded what this process wrote to 1 parameters: other" in log.text
    with pytest.raises(InvalidOption), weights.stage() as staged, weights.barrier.stopped() as stopped:
        staged.swap(stopped, changed="keep")  # type: ignore[arg-type]


def test_weights_from_disk_have_no_other_generation(attached: Attached) -> None:
    with attached(mode="off") as weights:
        with pytest.raises(InvalidOption, match="from disk"):
            weights.stage()
        with pytest.raises(InvalidOption, match="from disk"):
            weights.follow()


def test_after_close_nothing_is_staged_or_swapped(weights: WeightSet) -> None:
    staged = weights.stage()
    weights.close()
    with weights.barrier.stopped() as stopped, pytest.raises(ValueError, match="closed"):
        staged.swap(stopped)
    staged.close()
    with pytest.raises(ValueError, match="closed"):
        weights.stage()


def test_a_forked_child_keeps_what_was_mapped_and_cannot_stage(weights: WeightSet, grants: list[HonestGrant]) -> None:
    ready, swapped = Gate(), Gate()
    square = weights["square"]

    def child() -> None:
        with pytest.raises(DaemonUnreachable, match="forked child"):
            weights.stage()
        ready.open()
        swapped.wait()
        assert (square == 1).all()

    with ThreadPoolExecutor() as threads:
        forked = threads.submit(in_child, child)
        ready.wait()
        swap(weights)
        swapped.open()
        forked.result(60)
    assert (square == 2).all()
    for gate in (ready, swapped):
        gate.close()


@pytest.mark.skipif(MREMAP is None, reason="the number of mremap on this machine is not known to the tests")
def test_a_swap_that_the_kernel_refuses_leaves_the_generation_in_use(
    weights: WeightSet, grants: list[HonestGrant]
) -> None:
    with weights.stage() as staged:

        def child() -> None:
            assert staged._mapped is not None
            deny(Denied(MREMAP or 0, 0, staged._mapped.segments[0].address))
            with weights.barrier.stopped() as stopped, pytest.raises(SwapFailed, match="are what they were"):
                staged.swap(stopped)
            assert (weights["square"] == 1).all()
            assert weights.generation == grants[0].message.generation
            weights.verify()

        in_child(child)


def test_a_daemon_that_does_not_answer_is_not_waited_for_and_its_late_descriptors_are_closed(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    late, back = Gate(), Gate()
    script: list[Step] = [Receive(), grants[0].step(), Receive(), Stall(late), grants[1].step(), Receive(), Open(back)]
    script += [grants[0].step(), AnswerPings()]
    with LyingDaemon(place.socket_path, script) as daemon, attached() as weights:
        fds = len(open_fds())
        with pytest.raises(DaemonNotReady, match="nothing within"):
            weights.stage(timeout_s=0.1)
        late.open()
        back.wait()
        assert daemon.wires[0].messages[2] == Switch(generation=grants[0].message.generation)
        assert weights.lease is not None
        weights.lease.ping()  # answers come in order: both grants were taken by now
        assert len(open_fds()) == fds
        assert (weights["square"] == 1).all()
    late.close()
    back.close()


def test_a_grant_that_nobody_asked_for_ends_the_conversation_and_leaves_no_descriptor(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    script: list[Step] = [Receive(), grants[0].step(), grants[1].step(), Stall()]
    with LyingDaemon(place.socket_path, script, [Receive(), Close()]), attached() as weights:
        assert weights.lease is not None
        assert weights.lease.wait_lost(20)
        assert "was not asked" in str(weights.lease.reason)


def test_a_lease_lost_after_a_swap_is_resumed_for_the_generation_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    die = Gate()
    resumed = Send(grants[1].message)
    first: list[Step] = [Receive(), grants[0].step(), Receive(), grants[1].step(), Stall(die), Close()]
    with LyingDaemon(place.socket_path, first, [Receive(), resumed, AnswerPings()]) as daemon, attached() as weights:
        swap(weights)
        assert weights.lease is not None
        die.open()
        assert weights.lease.wait_lost(20)
        assert weights.lease.wait_for("connected", timeout_s=20)
        resume = daemon.wires[1].messages[0]
        assert isinstance(resume, Resume)
        assert (resume.generation, resume.manifest_sha256) == (
            grants[1].message.generation,
            grants[1].message.manifest_sha256,
        )
    die.close()


def test_a_lease_lost_between_staging_and_swapping_is_brought_to_the_generation_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    die = Gate()
    first: list[Step] = [Receive(), grants[0].step(), Receive(), grants[1].step(), Stall(die), Close()]
    second: list[Step] = [Receive(), Send(grants[0].message), AnswerSwitches(grants)]
    with LyingDaemon(place.socket_path, first, second) as daemon, attached() as weights:
        lease = weights.lease
        assert lease is not None
        with weights.stage() as staged:
            die.open()
            assert lease.wait_lost(20)
            assert lease.wait_for("connected", timeout_s=20)
            with weights.barrier.stopped() as stopped:
                staged.swap(stopped)
        lease.ping()
        assert daemon.wires[1].messages[1] == Switch(generation=grants[1].message.generation)
    die.close()


def published(grant: HonestGrant) -> Event:
    return Event(
        kind="published",
        generation=grant.message.generation,
        message="",
        version=grant.message.version,
        drops=("prefix_cache",),
    )


def test_a_follower_says_what_was_published_and_is_not_in_use(
    grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    tell = Gate()
    script: list[Step] = [
        Receive(),
        grants[0].step(),
        Stall(tell),
        Send(published(grants[1])),
        AnswerSwitches(grants, current=grants[1]),
    ]
    with LyingDaemon(place.socket_path, script), attached() as weights:
        following = weights.follow()
        following._unheard = False  # this daemon does not answer Status
        assert following.wait(0)
        assert following.pending() is None
        assert not following.wait(0)
        tell.open()
        assert following.wait(20)
        found = following.pending()
        assert found is not None
        assert (found.generation, found.version, found.drops) == (
            grants[1].message.generation,
            grants[1].message.version,
            ("prefix_cache",),
        )
        swap(weights, generation=found.generation)
        assert following.pending() is None
    tell.close()
