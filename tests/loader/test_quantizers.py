"""What each method makes of a weight: the names, shapes and dtypes that engines have, and clear refusals."""

import pytest

from weightcached.loader.quantizers import quantizer
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.quantization import Quantization


def products(name, shape, dtype="bfloat16"):
    return [
        (one.name, one.shape, one.dtype)
        for one in quantizer("w", shape, Quantization.named(name), dtype=dtype).products
    ]


MADE: dict[str, list[tuple[str, tuple[int, ...], str]]] = {
    "fp8-tensor": [("w", (300, 256), "float8_e4m3fn"), ("w_scale", (1,), "float32")],
    "fp8": [("w", (300, 256), "float8_e4m3fn"), ("w_scale", (300, 1), "float32")],
    "fp8-block": [("w", (300, 256), "float8_e4m3fn"), ("w_scale_inv", (3, 2), "float32")],
    "fp8-block=100x100": [("w", (300, 256), "float8_e4m3fn"), ("w_scale_inv", (3, 3), "float32")],
    "int8": [("w", (300, 256), "int8"), ("w_scale", (300, 1), "float32")],
    "int4": [("w_packed", (300, 32), "int32"), ("w_scale", (300, 2), "bfloat16"), ("w_shape", (2,), "int64")],
    "int4-asym=64": [
        ("w_packed", (300, 32), "int32"),
        ("w_scale", (300, 4), "bfloat16"),
        ("w_zero_point", (38, 4), "int32"),
        ("w_shape", (2,), "int64"),
    ],
}


@pytest.mark.parametrize("name", MADE)
def test_a_matrix(name):
    assert products(name, (300, 256)) == MADE[name]


@pytest.mark.parametrize("name", MADE)
def test_a_stack_has_everything_once_for_each_expert(name):
    stacked = [
        (one, (7,) if one == "w_scale" and shape == (1,) else (7, *shape), dtype) for one, shape, dtype in MADE[name]
    ]
    assert products(name, (7, 300, 256)) == stacked


@pytest.mark.parametrize(("dtype", "scales"), [("float16", "float16"), ("float32", "float32"), ("float64", "float32")])
def test_scales_of_groups_have_the_weights_dtype(dtype, scales):
    assert products("int4", (8, 256), dtype)[1] == ("w_scale", (8, 2), scales)


@pytest.mark.parametrize(
    ("inputs", "way_out"), [(64, "int4=64"), (192, "int4=64"), (132, "fewer TP ranks"), (100, "fewer TP ranks")]
)
def test_groups_are_whole_or_refused(inputs, way_out):
    for name in ("int4", "int4-asym"):
        with pytest.raises(UnsupportedModel, match="groups of 128") as caught:
            products(name, (64, inputs))
        assert way_out in str(caught.value.next_step)


@pytest.mark.parametrize("name", MADE)
def test_a_weight_without_elements_is_refused(name):
    with pytest.raises(UnsupportedModel, match="no elements"):
        products(name, (0, 300, 256))


def test_a_combination_that_no_release_had_is_refused():
    with pytest.raises(UnsupportedModel, match="no such quantization"):
        quantizer("w", (8, 8), Quantization(method="int8", granularity="block"), dtype="bfloat16")
