"""The coverage proof: plans that are tampered with, one way each, are all refused; those that rules make are not."""

import dataclasses

import pytest

from tests.support.checkpoints import tiny_config
from tests.support.plans import headers, plan
from weightcached.loader.boxes import Box
from weightcached.loader.plan import Cast, Copy
from weightcached.loader.proof import prove
from weightcached.protocol.errors import PlanError

QKV = "model.layers.0.self_attn.qkv_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCALE = f"{DOWN}_scale"


def products_of(parameter, position, **changes) -> dict:
    """The change of ``transform`` that changes one of its products."""
    products = list(parameter.transform.products)
    products[position] = dataclasses.replace(products[position], **changes)
    return {"transform": dataclasses.replace(parameter.transform, products=tuple(products))}


@pytest.fixture
def whole():
    """A plan with everything in it: stacked parts, columns, padding, an alias, quantization."""
    made = plan(tiny_config(tie_word_embeddings=True), tp_size=2, tp_rank=1, quantization="fp8")
    return {parameter.name: parameter for parameter in made.parameters}


def test_the_untouched_plan_is_proven(whole):
    prove(list(whole.values()))


def copy_of(parameter, position, **changes) -> dict:
    """The change of ``copies`` that changes one copy."""
    copies = list(parameter.copies)
    copies[position] = dataclasses.replace(copies[position], **changes)
    return {"copies": tuple(copies)}


def moved(box: Box, axis: int, by: int) -> Box:
    start = list(box.start)
    start[axis] += by
    return Box(tuple(start), box.shape)


TAMPERED = {
    "a part left out": (QKV, lambda p: {"copies": p.copies[:2]}, "of 1024 elements"),
    "a part twice": (QKV, lambda p: {"copies": (*p.copies, p.copies[0])}, "overlap"),
    "a part moved over another": (
        QKV,
        lambda p: copy_of(p, 1, destination=moved(p.copies[1].destination, 0, -1)),
        "overlap",
    ),
    "a part moved outside": (
        QKV,
        lambda p: copy_of(p, 2, destination=moved(p.copies[2].destination, 0, 1)),
        "not inside",
    ),
    "a source outside its tensor": (
        DOWN,
        lambda p: copy_of(p, 0, source=moved(p.copies[0].source, 1, 1)),
        "not inside",
    ),
    "a negative source": (DOWN, lambda p: copy_of(p, 0, source=moved(p.copies[0].source, 1, -25)), "not inside"),
    "boxes of different shapes": (
        DOWN,
        lambda p: copy_of(p, 0, source=Box((0, 0), (24, 32))),
        "does not fit",
    ),
    "a matrix transposed that is not": (DOWN, lambda p: copy_of(p, 0, transposed=True), "does not fit"),
    "a row transposed that is none": (NORM, lambda p: copy_of(p, 0, transposed=True), "does not fit"),
    "an empty copy": (
        NORM,
        lambda p: {"copies": (*p.copies, Copy(p.copies[0].tensor, Box((0,), (0,)), Box((0,), (0,))))},
        "empty",
    ),
    "padding left out": (EMBEDDING, lambda p: {"zeros": ()}, "elements are written"),
    "padding over data": (EMBEDDING, lambda p: {"zeros": (*p.zeros, Box((0, 0), (1, 1)))}, "overlap"),
    "another dtype stored than copied": (NORM, lambda p: {"dtype": "float32"}, "stored as float32"),
    "a cast to another dtype than stored": (NORM, lambda p: {"transform": Cast("float16")}, "float16"),
    "another source dtype than the tensor's": (NORM, lambda p: {"source_dtype": "float16"}, "not float16"),
    "quantized bytes stored as others": (DOWN, lambda p: {"dtype": "bfloat16"}, "stored as bfloat16"),
    "nothing to quantize": (DOWN, lambda p: {"copies": (), "source_dtype": None}, "nothing to quantize"),
    "a scale that is not planned": (DOWN, lambda p: products_of(p, 1, name="elsewhere"), "elsewhere"),
    "another weight's scale": (DOWN, lambda p: products_of(p, 1, name=f"{QKV}_scale"), "not planned as its own"),
    "a weight that its quantization does not make": (DOWN, lambda p: products_of(p, 0, name=NORM), "norm"),
    "a share of other rows": (DOWN, lambda p: products_of(p, 1, rows=2), "row by row"),
    "a share that is no matrix's": (DOWN, lambda p: products_of(p, 1, rows=None, shape=(31, 1)), "(31, 1)"),
    "a scale whose weight is not quantized": (SCALE, lambda p: {"produced_by": NORM}, "not quantized"),
    "a scale of a weight that is not there": (SCALE, lambda p: {"produced_by": "gone"}, "gone"),
    "a scale of another weight": (SCALE, lambda p: {"produced_by": QKV}, "does not produce it"),
    "a scale of the wrong shape": (SCALE, lambda p: {"shape": (31, 1)}, "(31, 1)"),
    "a scale of the wrong dtype": (SCALE, lambda p: {"dtype": "float16"}, "float16"),
    "a scale that is also padding": (SCALE, lambda p: {"zeros": (Box((0, 0), (32, 1)),)}, "by itself"),
    "an alias of nothing": (HEAD, lambda p: {"alias_of": "gone"}, "gone"),
    "an alias of itself": (HEAD, lambda p: {"alias_of": HEAD}, "no parameter with a place"),
    "an alias of another shape": (HEAD, lambda p: {"alias_of": NORM}, "another shape"),
    "an alias of another dtype": (HEAD, lambda p: {"dtype": "float32"}, "another shape or dtype"),
    "an alias that is also padding": (HEAD, lambda p: {"zeros": (Box((0, 0), (64, 32)),)}, "by itself"),
    "nobody writes it": (HEAD, lambda p: {"alias_of": None}, "0 of 2048 elements"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_plan_is_refused(whole, case):
    name, change, needle = TAMPERED[case]
    whole[name] = dataclasses.replace(whole[name], **change(whole[name]))
    with pytest.raises(PlanError) as caught:
        prove([whole.pop(name), *whole.values()])
    assert needle in str(caught.value)


def test_two_parameters_of_one_name(whole):
    with pytest.raises(PlanError, match="one name"):
        prove([*whole.values(), whole[NORM]])


def test_boxes_may_differ_in_axes_of_length_one(whole):
    """How one expert's matrix will go into a stack of them."""
    tensor = headers({"expert": (4, 6)})["expert"]
    stacked = dataclasses.replace(
        whole[NORM],
        shape=(2, 4, 6),
        copies=tuple(Copy(tensor, Box((0, 0), (4, 6)), Box((i, 0, 0), (1, 4, 6))) for i in range(2)),
    )
    prove([stacked])
    with pytest.raises(PlanError, match="elements are written"):
        prove([dataclasses.replace(stacked, copies=stacked.copies[:1])])


def test_matrices_may_be_transposed_alone_or_in_a_stack(whole):
    tensor = headers({"stack": (2, 4, 6)})["stack"]
    copies = tuple(Copy(tensor, Box((i, 0, 0), (1, 4, 6)), Box((i, 0, 0), (1, 6, 4)), transposed=True) for i in (0, 1))
    stacked = dataclasses.replace(whole[NORM], shape=(2, 6, 4), copies=copies)
    prove([stacked])
    prove(
        [
            dataclasses.replace(
                stacked, copies=(Copy(tensor, Box((0, 0, 0), (2, 4, 6)), Box((0, 0, 0), (2, 6, 4)), True),)
            )
        ]
    )
    turned = dataclasses.replace(
        stacked, shape=(2, 4, 6), copies=tuple(dataclasses.replace(c, transposed=False) for c in copies)
    )
    with pytest.raises(PlanError, match="does not fit"):
        prove([turned])
