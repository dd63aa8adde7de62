"""Spellings of online quantization: each stands for every parameter, and what cannot be is refused with what can."""

import json

import pytest

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.quantization import SPELLINGS, Quantization

NAMED = {
    "none": Quantization(),
    "fp8": Quantization(method="fp8", granularity="channel"),
    "fp8-tensor": Quantization(method="fp8", granularity="tensor"),
    "fp8-block": Quantization(method="fp8", granularity="block", block=(128, 128)),
    "fp8-block=64x32": Quantization(method="fp8", granularity="block", block=(64, 32)),
    "int8": Quantization(method="int8", granularity="channel", symmetric=True),
    "int4": Quantization(method="int4", granularity="group", group=128, symmetric=True),
    "int4=32": Quantization(method="int4", granularity="group", group=32, symmetric=True),
    "int4-asym": Quantization(method="int4", granularity="group", group=128, symmetric=False),
    "int4-asym=64": Quantization(method="int4", granularity="group", group=64, symmetric=False),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_stands_for_every_parameter(name: str) -> None:
    assert Quantization.named(name) == NAMED[name]
    assert Quantization.named(NAMED[name].spelled) == NAMED[name]


@pytest.mark.parametrize("name", NAMED)
def test_its_fields_are_json_and_come_back(name: str) -> None:
    fields = json.loads(json.dumps(NAMED[name].model_dump()))
    assert fields == NAMED[name].model_dump()
    assert Quantization.model_validate(fields) == NAMED[name]


def test_what_is_spelled_out_says_every_parameter() -> None:
    spelled = [quantization.spelled for quantization in NAMED.values()]
    assert spelled == [
        *("none", "fp8", "fp8-tensor", "fp8-block=128x128", "fp8-block=64x32"),
        *("int8", "int4=128", "int4=32", "int4-asym=128", "int4-asym=64"),
    ]


@pytest.mark.parametrize("name", ["", "FP8", "fp4", "fp8=", "fp8=channel", "fp8-channel", "none=1", "int8=64", "int4 "])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Quantization.named(name)
    assert caught.value.expected == SPELLINGS


@pytest.mark.parametrize(
    "name",
    [
        *(f"fp8-block={size}" for size in ("", "128", "0x128", "128x0", "-1x1", "1x1x1", "65537x1", "٣x٣", "1 x 1")),
        *(f"int4={size}" for size in ("", "0", "4", "12", "-8", "8.0", "65544", "1_6", "9" * 5000)),
        "int4-asym=100",
    ],
)
def test_a_parameter_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="cannot be used"):
        Quantization.named(name)
