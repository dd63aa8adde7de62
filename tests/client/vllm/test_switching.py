"""What all ranks of a vLLM switch to, or none: by what each says, as vLLM hands it on. With vLLM: tests/engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.denied import MREMAP, Denied, deny
from tests.support.eventually import eventually
from tests.support.forked import in_child
from weightcached.client import WeightSet
from weightcached.client.agreement import Standing
from weightcached.client.stale import STALE_EXIT
from weightcached.client.vllm import swapping
from weightcached.client.vllm.switching import WeightSwitching, published_version, switch_weights
from weightcached.protocol.errors import DaemonNotReady, GenerationGone, RanksDisagree, SwapFailed, WeightCacheError

OLD, DIGEST, RECEIPTS, OTHERS = "receipts:0", "digest:1", "receipts:1", "receipts:2"
Answers = Sequence[Mapping[str, Any] | None]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([()], None),
        ([(DIGEST, RECEIPTS)], DIGEST),
        ([(DIGEST, RECEIPTS), (DIGEST, RECEIPTS)], DIGEST),
        ([(DIGEST, RECEIPTS), (RECEIPTS, RECEIPTS)], RECEIPTS),  # the second did not know its digest yet
        ([(RECEIPTS, RECEIPTS), (DIGEST, RECEIPTS)], RECEIPTS),
        ([(DIGEST, RECEIPTS), (DIGEST, OTHERS)], DIGEST),  # one content, by other files
        ([(DIGEST, RECEIPTS), ()], None),
        ([(DIGEST, RECEIPTS), (OLD, OLD)], None),
    ],
)
def test_a_version_is_published_when_all_ranks_have_one_in_common(
    ranks: list[tuple[str, ...]], found: str | None
) -> None:
    assert published_version(SimpleNamespace(collective_rpc=lambda method: ranks)) == found


class Ranks:
    """The side of vLLM's ``LLM`` that a switch uses: what its ranks answer is given, and what is called is noted.

    ``standings`` are answered one after the other, the last for ever. ``interrupt`` is raised instead of any.
    """

    def __init__(
        self, *standings: Answers, swapped: Answers = (), interrupt: type[BaseException] | None = None
    ) -> None:
        self.called: list[Any] = []
        self.paused = False
        self.dropped = True
        self.llm_engine = SimpleNamespace(
            reset_encoder_cache=lambda: self.called.append("reset_encoder_cache"), is_sleeping=lambda: self.paused
        )
        self._standings = list(standings)
        self._swapped = swapped
        self._interrupt = interrupt

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Answers:
        word = method.removeprefix("weightcached_")
        if word == "standing":
            if self._interrupt is not None:
                raise self._interrupt
            return self._standings.pop(0) if self._standings[1:] else self._standings[0]
        self.called.append((word, *args))
        return self._swapped if word == "swap" else [None] * len(self._swapped)

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.called.append(("reset_prefix_cache", reset_running_requests, reset_connector))
        return self.dropped

    def sleep(self, *, level: int, mode: str) -> None:
        self.called.append(("sleep", level, mode))
        self.paused = True

    def wake_up(self, *, tags: list[str]) -> None:
        self.called.append(("wake_up", *tags))
        self.paused = False


def standing(rank: int, version: str, receipts: str = RECEIPTS) -> dict[str, Any]:
    """What a rank says that has prepared this."""
    place = f"host-tp{rank}of2"
    made = Standing(
        rank=place,
        place=place,
        source="daemon",
        version=version,
        receipts_version=receipts,
        generation=f"{rank}" * 32,
    )
    return made.model_dump()


def said(error: WeightCacheError) -> dict[str, Any]:
    return {"code": error.code, "error": str(error)}


READY = [standing(0, DIGEST), standing(1, DIGEST)]
DONE = [{"to_version": DIGEST}, {"to_version": DIGEST}]
FAILED = said(SwapFailed("memory could not be moved", found="ENOMEM"))
BACK = said(RanksDisagree("not all ranks could swap to one version, and this one has taken back the one before"))
STAGED = ("stage", DIGEST, 60.0)
PAUSED, GOES_ON = ("sleep", 0, "keep"), ("wake_up", "scheduling")
DROPPED = [("reset_prefix_cache", True, True), "reset_encoder_cache"]


def switch(ranks: Ranks, **options: Any) -> list[dict[str, Any]]:
    return switch_weights(ranks, **{"version": DIGEST, "timeout_s": 60.0, **options})


@pytest.mark.parametrize("changed", ["refuse", "discard"])
def test_all_ranks_prepare_then_all_swap_and_caches_are_dropped_before_another_step(changed: str) -> None:
    ranks = Ranks([None, None], [READY[0], None], READY, swapped=DONE)
    assert switch(ranks, changed=changed) == DONE
    assert ranks.called == [STAGED, PAUSED, ("swap", changed), *DROPPED, GOES_ON]


def test_whoever_has_paused_the_engine_has_it_go_on() -> None:
    ranks = Ranks(READY, swapped=DONE)
    ranks.paused = True
    assert switch(ranks) == DONE
    assert ranks.called == [STAGED, ("swap", "refuse"), *DROPPED]


def test_an_engine_that_could_not_drop_its_caches_stays_paused() -> None:
    """With new weights it would compute over keys and values of the old ones."""
    ranks = Ranks(READY, swapped=DONE)
    ranks.dropped = False
    with pytest.raises(SwapFailed, match="could not be dropped") as raised:
        switch(ranks)
    assert not raised.value.intact
    assert ranks.called == [STAGED, PAUSED, ("swap", "refuse"), DROPPED[0]]


def test_a_rank_that_does_not_know_its_digest_yet_agrees_by_receipts() -> None:
    ranks = Ranks([READY[0], standing(1, RECEIPTS)], swapped=DONE)
    assert switch(ranks) == DONE


def test_ranks_that_have_prepared_different_versions_all_give_up() -> None:
    ranks = Ranks([READY[0], standing(1, "digest:2", OTHERS)], swapped=DONE)
    with pytest.raises(RanksDisagree, match=r"digest:1.*digest:2") as raised:
        switch(ranks)
    assert "host-tp1of2" in str(raised.value)
    assert ranks.called == [STAGED, ("give_up",)]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_could_not_prepare_is_raised_and_all_give_up(failing: int) -> None:
    standings = list(READY)
    standings[failing] = said(GenerationGone("that version is not held here"))
    ranks = Ranks(standings, swapped=DONE)
    with pytest.raises(GenerationGone, match="not held here"):
        switch(ranks)
    assert ranks.called == [STAGED, ("give_up",)]


def test_a_rank_that_is_not_ready_in_time_has_all_give_up() -> None:
    ranks = Ranks([READY[0], None], swapped=DONE)
    with pytest.raises(DaemonNotReady, match="1 ranks"):
        switch(ranks, timeout_s=0.01)
    assert ranks.called == [("stage", DIGEST, 0.01), ("give_up",)]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_the_wait_has_all_give_up(interrupt: type[BaseException]) -> None:
    ranks = Ranks(READY, swapped=DONE, interrupt=interrupt)
    with pytest.raises(interrupt):
        switch(ranks)
    assert ranks.called == [STAGED, ("give_up",)]


@pytest.mark.parametrize("swapped", [[FAILED, FAILED], [FAILED, BACK], [BACK, FAILED]])
def test_where_a_rank_could_not_swap_its_error_is_raised_and_all_go_on_with_what_they_had(swapped: Answers) -> None:
    ranks = Ranks(READY, swapped=swapped)
    with pytest.raises(SwapFailed, match="ENOMEM"):
        switch(ranks)
    assert ranks.called == [STAGED, PAUSED, ("swap", "refuse"), GOES_ON]


@pytest.mark.skipif(MREMAP is None, reason="the number of mremap on this machine is not known to the tests")
def test_a_rank_whose_weights_are_lost_ends(swappable: WeightSet, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever has called it: the worker itself does."""
    model = torch.nn.Module()
    swapping.remember(model, swappable, {})
    worker = WeightSwitching()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.weightcached_stage(None, 10.0)
    staging = worker._weightcached_staging
    assert staging is not None
    eventually(lambda: staging.done)

    def child() -> None:
        for segment in swappable._open():
            deny(Denied(MREMAP or 0, 4, segment.address))  # nothing can be moved there, not even what was
        worker.weightcached_swap("refuse")

    with pytest.raises(AssertionError, match=f"ended with status {STALE_EXIT << 8}"):
        in_child(child)
    assert "the weights are lost" in capfd.readouterr().err
    worker.weightcached_give_up()
