"""Placement: aligned, disjoint, in the plan's order, the same for the same config; aliases share a place."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import tiny_config, tiny_shapes
from tests.support.plans import FILE, headers, plan
from weightcached.loader.layout import ALIGNMENT_BYTES, Places, aligned, place
from weightcached.loader.plan import TensorHeader
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.messages import GRANT_SEGMENTS_MAX


@st.composite
def mixed_headers(draw):
    made = {}
    for name in draw(st.lists(st.text("abc.", min_size=1, max_size=4), unique=True, max_size=12)):
        row = draw(st.sampled_from(list(DTYPES.values())))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        made[name] = TensorHeader(name, row.name, shape, FILE, 0, math.prod(shape) * row.itemsize_bytes)
    return made


@given(mixed_headers())
def test_places_are_aligned_in_order_and_apart(tensors):
    made = plan(tiny_config(architecture="Any"), tensors, layout="hf")
    placement = place(made)
    assert [placed.parameter for placed in placement.placed] == list(made.parameters)
    end = 0
    for placed in placement.placed:
        assert placed.offset == aligned(end)
        assert placed.nbytes == tensors[placed.parameter.name].nbytes
        end = placed.offset + placed.nbytes
    assert placement.nbytes == aligned(end)


@given(st.integers(0, 1 << 50))
def test_aligned_is_the_next_multiple(offset):
    assert aligned(offset) % ALIGNMENT_BYTES == 0
    assert 0 <= aligned(offset) - offset < ALIGNMENT_BYTES


def test_nothing_takes_no_room():
    assert place(plan(tiny_config(architecture="Any"), {}, layout="hf")).nbytes == 0


def test_an_alias_shares_the_place_of_its_target():
    tied, untied = (place(plan(tiny_config(tie_word_embeddings=tie))) for tie in (True, False))
    places = {placed.parameter.name: (placed.offset, placed.nbytes) for placed in tied.placed}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    assert untied.nbytes - tied.nbytes == aligned(128 * 32 * 2)


@pytest.mark.parametrize("options", [{"layout": "hf"}, {"tp_size": 2, "quantization": "fp8"}])
def test_equal_configs_have_equal_places_whatever_the_files(options):
    shapes = tiny_shapes(tiny_config())
    one = headers(shapes)
    other = {
        name: TensorHeader(name, t.dtype, t.shape, f"{i % 3}.safetensors", 8 * i, t.nbytes)
        for i, (name, t) in enumerate(reversed(one.items()))
    }
    first, second = (place(plan(tensors=tensors, **options)) for tensors in (one, other))
    assert [(p.parameter.name, p.offset, p.nbytes) for p in first.placed] == [
        (p.parameter.name, p.offset, p.nbytes) for p in second.placed
    ]
    assert first.nbytes == second.nbytes


def test_every_rank_has_the_same_places():
    model = tiny_config(vocab_size=10)
    places = [
        [(p.parameter.name, p.offset, p.nbytes) for p in place(plan(model, tp_size=4, tp_rank=rank)).placed]
        for rank in range(4)
    ]
    assert all(of_rank == places[0] for of_rank in places)


@given(mixed_headers(), st.integers(0, 4096))
def test_with_a_limit_segments_follow_each_other_in_the_same_order_and_none_is_larger(tensors, more):
    """A segment ends only where the next parameter does not fit into it; what lies where depends on nothing else."""
    most = aligned(max([header.nbytes for header in tensors.values()], default=0)) + ALIGNMENT_BYTES + more
    made = plan(tiny_config(architecture="Any"), tensors, layout="hf")
    placement = place(made, most)
    assert [placed.parameter for placed in placement.placed] == list(made.parameters)
    assert max(placement.segments_nbytes) <= most
    where, end = 0, 0
    for placed in placement.placed:
        if placed.segment != where:
            assert placed.segment == where + 1
            assert end + aligned(placed.nbytes) > most // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            where, end = placed.segment, 0
        assert placed.offset == end
        end = aligned(end + placed.nbytes)
        assert end <= placement.segments_nbytes[where]
    assert place(made, most) == placement
    assert placement.nbytes == place(made).nbytes


def test_a_parameter_that_no_segment_holds_is_named():
    with pytest.raises(UnsupportedModel, match=r"model\.embed_tokens\.weight is larger than a segment") as caught:
        place(plan(), 4096)
    assert caught.value.next_step is not None


def test_more_segments_than_a_grant_carries_are_refused_with_the_limit():
    places = Places(1024)
    for number in range(GRANT_SEGMENTS_MAX):
        assert places.take(f"p{number}", 1000) == (number, 0)
    with pytest.raises(UnsupportedModel, match=f"at most {GRANT_SEGMENTS_MAX} of at most 1024 bytes"):
        places.take("one more", 1000)
    assert places.take("nothing", 0) == (GRANT_SEGMENTS_MAX - 1, 1024)


def test_an_alias_is_in_the_segment_of_its_target():
    placement = place(plan(tiny_config(tie_word_embeddings=True)), aligned(128 * 32 * 2))
    places = {placed.parameter.name: (placed.segment, placed.offset) for placed in placement.placed}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    assert len(placement.segments_nbytes) > 1
    assert all(one for one in itertools.islice(placement.segments_nbytes, 1, None))
