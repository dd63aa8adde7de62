"""What is not swapped in, and what that leaves: another layout or config, a lie, parameters that were written to."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.swaps import SEGMENTS, TIED, N, swap, tensors
from weightcached.client import WeightSet
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import (
    GenerationGone,
    InvalidOption,
    SwapRefused,
    TransferError,
)
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    AnswerSwitches,
    HonestGrant,
    LyingDaemon,
    Receive,
    Step,
    TensorBytes,
    honest_grant,
)

Attached = Callable[..., WeightSet]


def test_a_generation_that_is_gone_is_refused_and_nothing_changes(
    swappable: WeightSet, grants: list[HonestGrant]
) -> None:
    with pytest.raises(GenerationGone, match="not held here"):
        swappable.stage(generation="f" * 32)
    assert swappable.generation == grants[0].message.generation
    assert swappable.state == "connected"
    swap(swappable)


def test_another_layout_is_refused_naming_what_differs(
    config: CacheConfig, grants: list[HonestGrant], place: Place, attached: Attached
) -> None:
    odd = {
        **tensors(2),
        "square": TensorBytes("int32", (N, N), bytes(4 * N * N)),
        "more": TensorBytes("uint8", (1,), b"1"),
    }
    del odd["codes"]
    with honest_grant(odd, config=config, receipts="2" * 64, aliases=TIED, segment_count=len(SEGMENTS)) as other:
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
def test_parameters_that_were_written_to_are_named(swappable: WeightSet, policy: str) -> None:
    swappable["square"][2, 2] = 7
    swappable["codes"][4999] = swappable["codes"][4999]  # a page of its own with the same bytes is no change
    with swappable.stage() as staged:
        assert staged.changed == ("square",)
        if policy == "refuse":
            with (
                swappable.barrier.stopped() as stopped,
                pytest.raises(SwapRefused, match=r"written to 1 p.*square"),
            ):
                staged.swap(stopped)
            assert swappable["square"][2, 2] == 7
            swappable.revert()
    if policy == "refuse":
        swap(swappable)
        assert (swappable["square"] == 2).all()
    else:
        with swappable.stage() as staged, swappable.barrier.stopped() as stopped:
            done = staged.swap(stopped, changed="discard")
        assert done.changed == ("square",)
        assert (swappable["square"] == 2).all()


def test_what_is_written_after_staging_is_told_when_the_barrier_is_left(
    swappable: WeightSet, log: pytest.LogCaptureFixture
) -> None:
    with swappable.stage() as staged:
        swappable["other"][1, 1] = 7
        with swappable.barrier.stopped() as stopped:
            done = staged.swap(stopped)
            assert not done.changed
        assert list(done.changed) == ["other"]
    assert "discarded what this process wrote to 1 parameters: other" in log.text
    with pytest.raises(InvalidOption), swappable.stage() as staged, swappable.barrier.stopped() as stopped:
        staged.swap(stopped, changed="keep")  # type: ignore[arg-type]


def test_weights_from_disk_have_no_other_generation(attached: Attached) -> None:
    with attached(mode="off") as weights:
        with pytest.raises(InvalidOption, match="from disk"):
            weights.stage()
        with pytest.raises(InvalidOption, match="from disk"):
            weights.follow()
