"""Which shards a command line means: every rank of a model, or those that are named, as keywords that attach takes."""

import argparse
import inspect

import pytest

from weightcached.client import attach
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.shard_options import add_rank_filters, add_shard_arguments, shards_of


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shard_arguments(parser)
    add_rank_filters(parser)
    return parser.parse_args(words)


def ranks(*words: str) -> list[tuple[int, int, int]]:
    return [(one["pp_rank"], one["tp_rank"], one["ep_rank"]) for one in shards_of(given(*words))]


def test_all_ranks_are_meant_unless_some_are_named() -> None:
    assert ranks() == [(0, 0, 0)]
    assert ranks("--tp-size", "2", "--pp-size", "2") == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert ranks("--tp-size", "2", "--pp-size", "2", "--tp-rank", "1") == [(0, 1, 0), (1, 1, 0)]
    assert ranks("--tp-size", "2", "--ep-size", "4", "--ep-rank", "3") == [(0, 1, 3)]


def test_what_is_the_same_for_all_ranks() -> None:
    words = ("--layout", "fused", "--dtype", "float16", "--quantization", "int8", "--expert-placement", "round_robin")
    (shard,) = shards_of(given(*words))
    wanted = {"layout": "fused", "dtype": "float16", "quantization": "int8", "expert_placement": "round_robin"}
    assert wanted.items() <= shard.items()
    for function in (attach, build_config):
        assert shard.keys() <= inspect.signature(function).parameters.keys()


@pytest.mark.parametrize("words", [("--tp-rank", "1"), ("--tp-size", "2", "--pp-rank", "1")])
def test_a_rank_that_there_is_not(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOption, match=words[-2]):
        shards_of(given(*words))
