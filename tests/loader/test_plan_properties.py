"""Plans of random models on random numbers of ranks, compared with plain numpy and with counting.

Ranks together take every checkpoint element the right number of times; every parameter element is written once; each
rank holds what slicing whole heads and concatenating would give; refused are exactly the sizes that do not divide.
"""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import naive
from tests.support.checkpoints import tiny_config, tiny_shapes
from tests.support.plans import parameters, plan
from weightcached.protocol.errors import UnsupportedModel

FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@st.composite
def models(draw):
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4)) if draw(st.booleans()) else draw(st.integers(1, 16))
    return tiny_config(
        architecture=draw(st.sampled_from(FAMILIES)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 4)) * draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12])),
        vocab_size=draw(st.integers(1, 400)),
        num_hidden_layers=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16])


@st.composite
def shared_models(draw):
    """(model, size) that divide: fewer key/value heads than ranks, as many, or more."""
    size = draw(sizes)
    kv_heads = draw(st.sampled_from([n for n in range(1, 25) if size % n == 0 or n % size == 0]))
    step = size // math.gcd(size, 64)
    padded = 64 * step * draw(st.integers(1, 3))
    model = draw(models())
    model.update(
        num_attention_heads=size * draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        intermediate_size=size * draw(st.integers(1, 3)),
        vocab_size=padded - draw(st.integers(0, 63)),
    )
    return model, size


def divides(model, size):
    """Whether ``size`` ranks can share the model, by the rules as they are written down."""
    kv_heads, vocabulary = model["num_key_value_heads"], model["vocab_size"]
    padded = (vocabulary + 63) // 64 * 64
    whole_kv = kv_heads % size == 0 if size < kv_heads else size % kv_heads == 0
    return (
        model["num_attention_heads"] % size == 0
        and whole_kv
        and model["intermediate_size"] % size == 0
        and padded % size == 0
    )


@settings(max_examples=60, deadline=None)
@given(models() | shared_models().map(lambda case: case[0]), sizes, st.data())
def test_refused_are_exactly_the_sizes_that_do_not_divide(model, size, data):
    rank = data.draw(st.integers(0, size - 1))
    if divides(model, size):
        assert plan(model, tp_size=size, tp_rank=rank).parameters
        return
    with pytest.raises(UnsupportedModel) as refused:
        plan(model, tp_size=size, tp_rank=rank)
    possible = [size for size in range(1, model["num_attention_heads"] + 1) if divides(model, size)]
    assert refused.value.expected == "TP size " + ", ".join(map(str, possible))


def replicas(name, model, size):
    """On how many ranks each element of a checkpoint tensor lies."""
    if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
        return size
    if ".k_proj." in name or ".v_proj." in name:
        return max(1, size // model["num_key_value_heads"])
    return 1


@settings(max_examples=40, deadline=None)
@given(shared_models())
def test_ranks_together_take_every_element_the_right_number_of_times(case):
    model, size = case
    shapes = tiny_shapes(model)
    taken = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank in range(size):
        for parameter in plan(model, tp_size=size, tp_rank=rank).parameters:
            written = np.zeros(parameter.shape, int)
            for copy in parameter.copies:
                taken[copy.tensor.name][naive.slices(copy.source)] += 1
                written[naive.slices(copy.destination)] += 1
            for box in parameter.zeros:
                written[naive.slices(box)] += 1
            assert (written == (0 if parameter.alias_of else 1)).all(), parameter.name
    for name, counts in taken.items():
        assert (counts == replicas(name, model, size)).all(), name


@settings(max_examples=40, deadline=None)
@given(shared_models(), st.data())
def test_a_rank_holds_what_plain_slicing_gives(case, data):
    model, size = case
    rank = data.draw(st.integers(0, size - 1))
    tensors = {
        name: np.random.default_rng(index).integers(1, 1 << 16, shape, np.uint16)
        for index, (name, shape) in enumerate(tiny_shapes(model).items())
    }
    made = plan(model, tp_size=size, tp_rank=rank)
    ours, expected = naive.execute(made, tensors), plainly(tensors, model, size, rank)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(ours[name], value), name
    if model["tie_word_embeddings"]:
        assert parameters(made)["lm_head.weight"].alias_of == "model.embed_tokens.weight"


def plainly(tensors, model, size, rank):
    """This rank's parameters by numpy: split whole tensors, repeat key/value heads, concatenate. No offsets at all."""

    def split(array, axis=0):
        return np.split(array, size, axis)[rank]

    def kv(array):
        heads = array.reshape(model["num_key_value_heads"], model["head_dim"], *array.shape[1:])
        heads = np.repeat(heads, max(1, size // model["num_key_value_heads"]), axis=0)
        return split(heads).reshape(-1, *array.shape[1:])

    def vocabulary(array):
        padding = -len(array) % 64
        return split(np.concatenate([array, np.zeros((padding, array.shape[1]), array.dtype)]))

    made = {}
    for name, array in tensors.items():
        stem, _, ending = name.rpartition(".")
        if stem.endswith(("embed_tokens", "lm_head")):
            made[name] = vocabulary(array)
        elif stem.endswith("q_proj"):
            key, value = (tensors[f"{stem[:-6]}{part}_proj.{ending}"] for part in "kv")
            made[f"{stem[:-6]}qkv_proj.{ending}"] = np.concatenate([split(array), kv(key), kv(value)])
        elif stem.endswith("gate_proj"):
            up = tensors[f"{stem[:-9]}up_proj.{ending}"]
            made[f"{stem[:-9]}gate_up_proj.{ending}"] = np.concatenate([split(array), split(up)])
        elif stem.endswith(("o_proj", "down_proj")):
            made[name] = split(array, 1) if ending == "weight" else array
        elif "norm" in stem:
            made[name] = array
    if model["tie_word_embeddings"]:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    return made


@settings(max_examples=60, deadline=None)
@given(shared_models())
def test_names_shapes_and_order_do_not_depend_on_the_rank(case):
    model, size = case
    seen = Counter(
        tuple((p.name, p.shape, p.dtype, p.alias_of) for p in plan(model, tp_size=size, tp_rank=rank).parameters)
        for rank in range(size)
    )
    assert len(seen) == 1
