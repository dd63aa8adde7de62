"""Headers and ``config.json`` of a hostile checkpoint: a plan that can be carried out, or an error of ours."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.checkpoints import tiny_config, tiny_shapes
from tests.support.fuzzing import JSON_VALUES, MIB, altered, damaged, ends_in
from tests.support.plans import cache_config, headers
from weightcached.loader.architectures import ARCHITECTURES
from weightcached.loader.headers import PREFIX_BYTES, FileHeader, header_nbytes, parse_header
from weightcached.loader.layout import place
from weightcached.loader.plan import make_plan
from weightcached.loader.reading import requested_nbytes
from weightcached.protocol.canonical import canonical_bytes
from weightcached.protocol.errors import CheckpointError, ConfigurationError

FILE = "model.safetensors"
HEADER = {
    "__metadata__": {"format": "pt"},
    "first": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]},
    "second": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]},
    "empty": {"dtype": "F8_E4M3", "shape": [0, 3], "data_offsets": [52, 52]},
}
DATA_NBYTES = 52
MODEL = tiny_config()
TENSORS = headers(tiny_shapes(MODEL))


def check_header(raw: bytes, data_nbytes: int) -> None:
    file_nbytes = PREFIX_BYTES + len(raw) + data_nbytes

    def read() -> FileHeader:
        prefix = struct.pack("<Q", len(raw))
        assert header_nbytes(prefix, file=FILE, file_nbytes=file_nbytes) == len(raw)
        return parse_header(raw, file=FILE, file_nbytes=file_nbytes)

    header = ends_in(CheckpointError, read)
    if header is None:
        return
    end = PREFIX_BYTES + len(raw)
    for tensor in header.tensors:
        assert tensor.offset == end
        end += tensor.nbytes
        json.dumps(tensor.name, ensure_ascii=False).encode()
    assert end == file_nbytes


@given(altered(HEADER, JSON_VALUES), st.sampled_from([DATA_NBYTES, DATA_NBYTES, 0, 51, 1 << 40]))
@example({"a": {"dtype": "U8", "shape": [(1 << 63) - 1] * 100_000, "data_offsets": [0, 0]}}, 0)  # found: hours
@example({"a": {"dtype": "U8", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, 0)  # found: no stride for it
@example({"a" * 5000: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, 0)
@example({"a": {"dtype": "x" * 100_000, "shape": [0], "data_offsets": [0, 0]}}, 0)  # found: all of it in the message
def test_an_altered_header(header: Any, data_nbytes: int) -> None:
    check_header(json.dumps(header).encode(), data_nbytes)


@given(damaged(json.dumps(HEADER).encode()), st.sampled_from([DATA_NBYTES, DATA_NBYTES, 0, 51, 1 << 40]))
def test_a_damaged_header(raw: bytes, data_nbytes: int) -> None:
    check_header(raw, data_nbytes)


@given(st.binary(max_size=16), st.integers(0, 1 << 64))
def test_a_length(prefix: bytes, file_nbytes: int) -> None:
    nbytes = ends_in(CheckpointError, lambda: header_nbytes(prefix, file=FILE, file_nbytes=file_nbytes))
    assert nbytes is None or 0 <= nbytes <= file_nbytes - PREFIX_BYTES


SIZES = st.integers(-2, 300) | st.sampled_from([10**4, 10**6, 10**12, 2**31, 2**62, 2**63 - 1, 2**64 - 1])
VALUES = SIZES | JSON_VALUES | st.booleans() | st.floats()


@given(
    altered(MODEL, VALUES),
    st.sampled_from(sorted(ARCHITECTURES)),
    st.sampled_from(["hf", "fused"]),
    st.sampled_from([1, 2, 3, 7, 64, 10**6, 2**40]),
    st.sampled_from(["none", "fp8"]),
)
@example({**MODEL, "num_hidden_layers": 10**12}, "LlamaForCausalLM", "fused", 1, "none")
@example({**MODEL, "num_attention_heads": 10**12, "head_dim": 10**12}, "LlamaForCausalLM", "fused", 10**6, "none")
@example({**MODEL, "vocab_size": 2**64 - 1}, "LlamaForCausalLM", "fused", 1, "none")
def test_a_model_config_beside_honest_headers(
    model: Any, architecture: str, layout: str, tp_size: int, quantization: str
) -> None:
    """A size that is not the files' own is refused, before anything is made of it."""
    if not isinstance(model, dict):
        return
    model["architectures"] = [architecture]

    def plan() -> int:
        config = cache_config(model, layout=layout, tp_size=tp_size, tp_rank=tp_size - 1, quantization=quantization)
        made = make_plan(TENSORS, model, config)
        placement = place(made)
        assert sum(requested_nbytes(made).values()) <= sum(header.nbytes for header in TENSORS.values())
        return placement.nbytes

    nbytes = ends_in((CheckpointError, ConfigurationError), plan, memory_max_nbytes=64 * MIB)
    if nbytes is not None and tp_size == 1:
        assert nbytes <= 2 * sum(header.nbytes for header in TENSORS.values()) + 256 * len(TENSORS)
    canonical_bytes(model)
