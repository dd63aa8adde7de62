"""What all ranks of a vLLM switch to, or none: by what each says, as vLLM hands it on. With vLLM: tests/engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.client.agreement import Standing
from weightcached.client.vllm.switching import published_version, switch_weights
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
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: self.called.append("reset_encoder_cache"))
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

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.called.append(("reset_prefix_cache", reset_running_requests))


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
STAGED = ("stage", DIGEST, 60.0)


def switch(ranks: Ranks, **options: Any) -> list[dict[str, Any]]:
    return switch_weights(ranks, **{"version": DIGEST, "timeout_s": 60.0, **options})


@pytest.mark.parametrize("changed", ["refuse", "discard"])
def test_all_ranks_prepare_then_all_swap_then_caches_are_dropped(changed: str) -> None:
    ranks = Ranks([None, None], [READY[0], None], READY, swapped=DONE)
    assert switch(ranks, changed=changed) == DONE
    assert ranks.called == [STAGED, ("swap", changed), ("reset_prefix_cache", True), "reset_encoder_cache"]


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


@pytest.mark.parametrize("swapped", [[DONE[0], FAILED], [FAILED, DONE[1]]])
def test_where_some_have_swapped_and_others_could_not_the_engine_has_to_end(swapped: Answers) -> None:
    ranks = Ranks(READY, swapped=swapped)
    with pytest.raises(RanksDisagree, match="end this engine and start it again") as raised:
        switch(ranks)
    assert DIGEST in str(raised.value.found)
    assert "ENOMEM" in str(raised.value.found)
    assert ranks.called == [STAGED, ("swap", "refuse")]


def test_where_none_could_swap_each_has_what_it_had_and_its_error_is_raised() -> None:
    ranks = Ranks(READY, swapped=[FAILED, FAILED])
    with pytest.raises(SwapFailed, match="ENOMEM"):
        switch(ranks)
    assert ranks.called == [STAGED, ("swap", "refuse")]
