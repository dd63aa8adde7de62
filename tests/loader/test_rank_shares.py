"""Who holds which layers and experts: as vLLM divides them, nothing twice, nothing left out; and what cannot be."""

import itertools

import pytest

from tests.support import expert_models
from tests.support.checkpoints import tiny_config, tiny_shapes
from tests.support.plans import headers, plan
from weightcached.loader.architectures.ranks import Rank, TooMany
from weightcached.loader.reference.ranks import Ranks
from weightcached.protocol.errors import UnsupportedModel


@pytest.mark.parametrize(
    ("layers", "shares"),
    [
        (8, [4, 4]),
        (7, [4, 3]),
        (9, [3, 3, 3]),
        (10, [3, 4, 3]),
        (11, [4, 4, 3]),
        (61, [15, 15, 16, 15]),
        (3, [1, 1, 1]),
    ],
)
def test_what_is_left_over_of_the_layers_goes_to_the_middle_first_and_never_to_the_last(layers, shares):
    """The examples are what vLLM 0.32's own ``get_pp_indices`` gives."""
    held = [Rank(1, 0, stages=len(shares), stage=stage).layers(layers) for stage in range(len(shares))]
    assert [len(some) for some in held] == shares
    assert list(itertools.chain(*held)) == list(range(layers))


def test_stages_for_any_numbers():
    for layers, stages in itertools.product(range(1, 40), range(1, 9)):
        if stages <= layers:
            held = [list(Rank(1, 0, stages=stages, stage=stage).layers(layers)) for stage in range(stages)]
            naive = [list(Ranks(stages=stages, stage=stage).layers(layers)) for stage in range(stages)]
            assert held == naive


def test_experts_for_any_numbers():
    for experts, ranks, in_turn in itertools.product(range(1, 20), range(1, 9), (False, True)):
        if ranks <= experts:
            for rank in range(ranks):
                held = list(Rank(1, 0, expert_ranks=ranks, expert_rank=rank, round_robin=in_turn).experts(experts))
                assert held == Ranks(expert_ranks=ranks, expert_rank=rank, in_turn=in_turn).experts(experts)


def test_the_first_ranks_have_one_expert_more():
    held = [Rank(1, 0, expert_ranks=4, expert_rank=rank).experts(10) for rank in range(4)]
    assert [(some.start, len(some)) for some in held] == [(0, 3), (3, 3), (6, 2), (8, 2)]


def test_more_ranks_than_there_is_to_share():
    with pytest.raises(TooMany):
        Rank(1, 0, expert_ranks=5, expert_rank=0).experts(4)
    with pytest.raises(TooMany):
        Rank(1, 0, stages=5, stage=0).layers(4)


def refused(config, shapes, **options):
    with pytest.raises(UnsupportedModel) as caught:
        plan(config, headers(shapes), **options)
    return caught.value


def test_a_refusal_says_how_many_ranks_there_may_be():
    config = expert_models.config_of("mixtral", num_local_experts=3, num_hidden_layers=2)
    shapes = expert_models.shapes_of(config)
    assert refused(config, shapes, ep_size=4, ep_rank=3).expected == "ep size 1 to 3"
    assert refused(config, shapes, pp_size=3, pp_rank=0).expected == "pp size 1 to 2"


def test_expert_ranks_of_a_model_without_experts():
    error = refused(tiny_config(), tiny_shapes(tiny_config()), ep_size=2, ep_rank=0)
    assert "no experts" in error.message


def test_expert_slices_that_do_not_divide_are_named_and_whole_experts_need_not():
    config = expert_models.config_of("mixtral", intermediate_size=50)
    shapes = expert_models.shapes_of(config)
    assert "expert_intermediate size 50" in refused(config, shapes, tp_size=4, tp_rank=0).message
    assert plan(config, headers(shapes), tp_size=4, tp_rank=1, ep_size=4, ep_rank=1).parameters


def test_sizes_that_would_do_are_found_where_only_later_layers_have_experts():
    config = expert_models.config_of("deepseek_v3", moe_intermediate_size=6, intermediate_size=48)
    error = refused(config, expert_models.shapes_of(config), tp_size=4, tp_rank=0)
    assert error.expected == "TP size 1, 2"


@pytest.mark.parametrize("layout", ["hf", "fused"])
def test_data_parallel_replicas_share_one_rank_s_daemon(layout):
    error = refused(tiny_config(), tiny_shapes(tiny_config()), layout=layout, dp_size=2)
    assert "one daemon" in error.next_step


@pytest.mark.parametrize("kind", ["pp", "ep"])
def test_layout_hf_has_neither_stages_nor_expert_ranks(kind):
    error = refused(tiny_config(), tiny_shapes(tiny_config()), layout="hf", **{f"{kind}_size": 2})
    assert f"{kind.upper()} size 2" in error.found
