"""Ranks: none is guessed, impossible ones are refused, and every rank of a model has a place of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.ranks import device_of, every_rank, rank_of, ranks_of


@pytest.mark.parametrize("kind", ["tp", "pp", "ep"])
def test_a_rank_is_never_guessed(kind: str) -> None:
    sizes = {"tp": 1, "pp": 1, "ep": 1, kind: 2}
    with pytest.raises(InvalidOption, match=f"^{kind}_rank is required"):
        rank_of(sizes, {})
    with pytest.raises(InvalidOption, match=f"--{kind}-rank is required when --{kind}-size is over 1"):
        rank_of(sizes, {}, spelling="--{}-{}")


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 2, "pp": 1, "ep": 1}, {"tp": 2}),
        ({"tp": 1, "pp": 1, "ep": 1}, {"pp": 1}),
        ({"tp": 1, "pp": 2, "ep": 1}, {"pp": -1}),
        ({"tp": 0, "pp": 1, "ep": 1}, {}),
        ({"tp": 2, "pp": 1, "ep": 3}, {"tp": 0, "ep": 0}),  # experts are over all devices: 2, 4, 6 and so on
        ({"tp": 2, "pp": 1, "ep": 4}, {"tp": 0, "ep": 3}),  # device 3 is tensor-parallel rank 1
        ({"tp": 4, "pp": 1, "ep": 2}, {"tp": 0, "ep": 0}),
    ],
)
def test_ranks_that_cannot_be(sizes: dict[str, int], ranks: dict[str, int | None]) -> None:
    with pytest.raises(InvalidOption):
        rank_of(sizes, ranks)


def test_an_unknown_placement() -> None:
    with pytest.raises(InvalidOption, match="unusable ranks"):
        rank_of({"tp": 1, "pp": 1, "ep": 1}, {}, placement="scattered")


def test_all_ranks_stage_by_stage() -> None:
    assert [device_of(rank) for rank in every_rank({"tp": 2, "pp": 2, "ep": 1})] == [
        "host-tp0of2-pp0of2",
        "host-tp1of2-pp0of2",
        "host-tp0of2-pp1of2",
        "host-tp1of2-pp1of2",
    ]
    assert [device_of(rank) for rank in every_rank({"tp": 2, "pp": 1, "ep": 4})] == [
        "host-tp0of2-ep0of4",
        "host-tp1of2-ep1of4",
        "host-tp0of2-ep2of4",
        "host-tp1of2-ep3of4",
    ]
    with pytest.raises(InvalidOption):
        every_rank({"tp": 2, "pp": 1, "ep": 3})


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_no_two_ranks_share_a_place_and_each_is_stated_by_its_own_numbers(tp: int, pp: int, replicas: int) -> None:
    sizes = {"tp": tp, "pp": pp, "ep": tp * replicas or 1}
    ranks = every_rank(sizes)
    assert len({device_of(rank) for rank in ranks}) == len(ranks) == pp * max(tp, tp * replicas)
    for rank in ranks:
        stated = {name.removesuffix("_rank"): number for name, number in ranks_of(rank).items()}
        assert rank_of(sizes, stated) == rank
