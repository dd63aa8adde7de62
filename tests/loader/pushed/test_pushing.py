"""What a trainer pushes lies there byte for byte as a load of the same tensors from files would.

The daemon's checkpoint (headers, base) and the pushed tensors are two checkpoints of one config with other values.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import RawTensor, tiny_config, tiny_llama, tiny_shapes, write_checkpoint
from tests.support.execution import load
from tests.support.plain import tensors_of
from tests.support.pushing import loaded_base, pushing
from tests.support.resources import nothing_left_behind
from tests.support.written import write
from weightcached.protocol.assigned import is_assigned
from weightcached.protocol.config import build_config
from weightcached.protocol.memory import host

LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 130, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 70, "n_positions": 16}


def other_values(directory: Path, **overrides: Any) -> Path:
    """The same shapes with values that follow from other names."""
    config = tiny_config(**overrides)
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        seed = int.from_bytes(hashlib.sha256(f"other {name}".encode()).digest()[:8], "little")
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed >> 1)).to(torch.bfloat16)
        tensors[name] = RawTensor("BF16", shape, values.view(torch.uint8).numpy().tobytes())
    return write_checkpoint(directory, config, {"model.safetensors": tensors})


def require_as_loaded(served: Path, trained: Path, *, bucket_nbytes: int = 64 * 1024, **options: Any) -> None:
    """Push all tensors of ``trained``, last first, to one that plans from ``served``."""
    expected = load(trained, **options)
    config = build_config(served, **options)
    tensors = tensors_of(trained)
    with (
        loaded_base(served, config) as base,
        pushing(served, config, base, bucket_nbytes=bucket_nbytes) as push,
    ):
        push.push(dict(reversed(tensors.items())))
        manifest = push.finish()
    assert list(manifest.names) == [row.name for row in expected.loaded.rows]
    for row in expected.loaded.rows:
        assert push.data[row.name] == expected.data[row.name], row.name
        assert manifest.row(row.name) == row
    assert is_assigned(manifest.meta.version)


CASES: dict[str, dict[str, Any]] = {
    "hf": {"layout": "hf", "tp_size": 1, "tp_rank": 0},
    "fused": {"layout": "fused", "tp_size": 1, "tp_rank": 0},
    "fused, rank 0 of 2": {"layout": "fused", "tp_size": 2, "tp_rank": 0},
    "fused, rank 1 of 2 (padding of the vocabulary)": {"layout": "fused", "tp_size": 2, "tp_rank": 1},
    "fused, ranks share heads": {"layout": "fused", "tp_size": 4, "tp_rank": 3},
    "fused, converted": {"layout": "fused", "tp_size": 2, "tp_rank": 1, "dtype": "float32"},
    "fused, fp8": {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "fp8"},
    "fused, fp8 measured first": {"layout": "fused", "tp_size": 2, "tp_rank": 0, "quantization": "fp8-tensor"},
    "fused, int4": {"layout": "fused", "tp_size": 1, "tp_rank": 0, "quantization": "int4=32"},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_push_is_as_a_load(tmp_path: Path, options: dict[str, Any]) -> None:
    served, trained = tiny_llama(tmp_path / "served", **LLAMA), other_values(tmp_path / "trained", **LLAMA)
    require_as_loaded(served, trained, **options)


@pytest.mark.parametrize("way", ["hf", "fused, converted", "fused, fp8 measured first"])
def test_a_push_into_several_segments_has_the_places_and_bytes_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whole, and then on top of what was served: what is kept is copied segment by segment."""
    monkeypatch.setattr(host, "segment_max_nbytes", 40 << 10)
    served, trained = tiny_llama(tmp_path / "served", **LLAMA), other_values(tmp_path / "trained", **LLAMA)
    before, after = load(served, **CASES[way]), load(trained, **CASES[way])
    config, tensors = build_config(served, **CASES[way]), tensors_of(trained)
    with loaded_base(served, config) as base:
        assert len(base.manifest.meta.segments_nbytes) > 1
        for names in (set(tensors), {name for name in tensors if "layers.1." in name}):
            with pushing(served, config, base, partial=names != set(tensors)) as push:
                push.push({name: tensors[name] for name in names})
                manifest = push.finish()
            assert manifest.meta.segments_nbytes == base.manifest.meta.segments_nbytes
            for row in base.manifest:
                wanted = after if names == set(tensors) or "layers.1." in row.name else before
                assert push.data[row.name] == wanted.data[row.name], row.name
                assert (manifest.row(row.name).segment, manifest.row(row.name).offset) == (row.segment, row.offset)


def test_tied_weights_are_pushed_once_and_have_two_names(tmp_path: Path) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    served, trained = tiny_llama(tmp_path / "served", **tied), other_values(tmp_path / "trained", **tied)
    require_as_loaded(served, trained, layout="fused", tp_size=2, tp_rank=1)


def test_what_lies_transposed_in_a_checkpoint(tmp_path: Path) -> None:
    served = write(tmp_path / "served", "GPT2LMHeadModel", GPT2)
    torch.manual_seed(1)
    trained = write(tmp_path / "trained", "GPT2LMHeadModel", {**GPT2, "initializer_range": 0.5})
    require_as_loaded(served, trained, layout="fused", tp_size=2, tp_rank=1)


def test_experts(tmp_path: Path) -> None:
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 64,
    }
    served = write(tmp_path / "served", "MixtralForCausalLM", config)
    trained = write(tmp_path / "trained", "MixtralForCausalLM", config)
    require_as_loaded(served, trained, layout="fused", tp_size=2, tp_rank=1)
    require_as_loaded(served, trained, layout="fused", tp_size=2, tp_rank=0, quantization="fp8")


def test_a_tensor_larger_than_a_bucket_comes_in_parts(tmp_path: Path) -> None:
    large = {**LLAMA, "vocab_size": 3000}
    served, trained = tiny_llama(tmp_path / "served", **large), other_values(tmp_path / "trained", **large)
    require_as_loaded(served, trained, layout="fused", tp_size=2, tp_rank=0)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_that_are_none_of_ours_are_taken_too(tmp_path: Path, axis: int) -> None:
    """A trainer that holds its own shards pushes what of them a rank needs, however they cut."""
    served, trained = tiny_llama(tmp_path / "served", **LLAMA), other_values(tmp_path / "trained", **LLAMA)
    options: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1}
    config, expected, tensors = build_config(served, **options), load(trained, **options), tensors_of(trained)
    with loaded_base(served, config) as base, pushing(served, config, base) as push:
        for name, tensor in tensors.items():
            for box in push.trainer.boxes(name):
                if len(box) != 2:
                    push.push_box(name, box, tensor[box])
                    continue
                middle = (box[axis].start + box[axis].stop) // 2
                for part in (slice(middle, box[axis].stop), slice(box[axis].start, middle)):
                    cut = (part, box[1]) if axis == 0 else (box[0], part)
                    push.push_box(name, cut, tensor[cut])
        push.finish()
    assert push.data == dict(expected.data)


def test_arrays_and_what_is_called_for_a_box(tmp_path: Path) -> None:
    served, trained = tiny_llama(tmp_path / "served", **LLAMA), other_values(tmp_path / "trained", **LLAMA)
    options: dict[str, Any] = {"layout": "fused", "tp_size": 2, "tp_rank": 1}
    ml_dtypes = pytest.importorskip("ml_dtypes")
    config, expected = build_config(served, **options), load(trained, **options)
    arrays = {name: t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for name, t in tensors_of(trained).items()}
    values: dict[str, Any] = {
        name: array if number % 2 else (lambda box, array=array: array[box])
        for number, (name, array) in enumerate(arrays.items())
    }
    with loaded_base(served, config) as base, pushing(served, config, base) as push:
        push.push(values)
        push.finish()
    assert push.data == dict(expected.data)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


def test_a_hundred_pushes_leave_nothing_behind(tmp_path: Path) -> None:
    """No descriptor, no mapping, no thread."""
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 1}
    served, trained = tiny_llama(tmp_path / "served", **small), other_values(tmp_path / "trained", **small)
    config, tensors = build_config(served, layout="fused", tp_size=1, tp_rank=0), tensors_of(trained)
    with loaded_base(served, config) as base, nothing_left_behind():
        for number in range(100):
            with pushing(served, config, base, partial=bool(number % 2)) as push:
                push.push(tensors)
                if number % 3:
                    push.finish()
