"""Post-processed weights in a module that is built as if they were not, and what became of weights in general."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.support.weight_sets import plain_row, weights_of_rows
from weightcached.client import WeightSet
from weightcached.client.vllm.in_place import sharing_of
from weightcached.client.vllm.processed import bind_processed, require_processed
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import BindError
from weightcached.protocol.manifest import Row

VALUES = torch.arange(8 * 64, dtype=torch.float32)
PLACE = 256
"""Rows begin at multiples of it."""


class Layer(nn.Module):
    """What is built; post-processing makes another shape of ``experts``, and takes ``scale`` away."""

    k_scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(2, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("k_scale", torch.zeros(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.both: list[Layer] = [layer for layer in self.layers if isinstance(layer, Layer)]
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def rows() -> list[Row]:
    made = []
    for layer in range(2):
        at = layer * 3 * PLACE
        made += [
            plain_row(f"layers.{layer}.experts", at, 48, (3, 4), (4, 1), "float32"),
            plain_row(f"layers.{layer}.norm", at + PLACE, 16, (4,), (1,), "float32"),
            dataclasses.replace(
                plain_row(f"layers.{layer}.k_scale", at + 2 * PLACE, 16, (4,), (1,), "float32"), kind="buffer"
            ),
        ]
    made.append(plain_row("embed.weight", 6 * PLACE, 32, (4, 2), (2, 1), "float32"))
    made.append(plain_row("head.weight", 6 * PLACE, 32, (4, 2), (2, 1), "float32", alias_of="embed.weight"))
    return made


@pytest.fixture
def weights(config: CacheConfig) -> Iterator[WeightSet]:
    with weights_of_rows(rows(), VALUES.numpy().tobytes(), config=config) as held:
        yield held


def test_what_has_kept_its_form_stays_its_object_and_what_has_not_is_replaced(weights: WeightSet) -> None:
    model = Model()
    norm, experts = model.both[0].norm, model.both[0].experts
    bind_processed(model, weights)
    assert model.both[0].norm is norm
    assert model.both[0].experts is not experts
    for name, parameter in model.named_parameters():
        if not name.endswith("scale"):
            assert parameter.data_ptr() == weights[name].data_ptr()
    assert model.head.weight is model.embed.weight
    assert [type(one.experts) for one in model.both] == [nn.Parameter] * 2


def test_buffers_are_copied(weights: WeightSet) -> None:
    model = Model()
    bind_processed(model, weights)
    for number, layer in enumerate(model.both):
        assert torch.equal(layer.k_scale, VALUES[(3 * number + 2) * PLACE // 4 :][:4])
        assert layer.k_scale.data_ptr() != weights[f"layers.{number}.k_scale"].data_ptr()


def test_a_parameter_that_nobody_has_filled_or_removed_is_named(weights: WeightSet) -> None:
    model = Model()
    bind_processed(model, weights)
    with pytest.raises(BindError, match=r"not in the weights: layers\.0\.scale, layers\.1\.scale"):
        require_processed(model, weights)
    for layer in model.both:
        del layer.scale
    require_processed(model, weights)


def test_a_weight_of_no_module_is_named_before_anything_changes(config: CacheConfig) -> None:
    model = Model()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    made = [*rows(), plain_row("layers.7.norm", 7 * PLACE, 16, (4,), (1,), "float32")]
    with (
        weights_of_rows(made, VALUES.numpy().tobytes(), config=config) as held,
        pytest.raises(BindError, match=r"no such module: layers\.7\.norm"),
    ):
        bind_processed(model, held)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_weights_that_are_no_parameter_s_memory_any_more_are_told_in_bytes(weights: WeightSet) -> None:
    model = Model()
    bind_processed(model, weights)
    whole = 2 * (48 + 16) + 32
    assert sharing_of(model, weights).nbytes_shared == whole
    for layer in model.both:
        layer.experts = nn.Parameter(layer.experts.clone(), requires_grad=False)  # in a kernel's own order
    model.both[0].norm.data = torch.empty(0)  # in a handle
    found = sharing_of(model, weights)
    assert found.nbytes_shared == whole - 2 * 48 - 16
    assert found.made_anew == {"layers.*.experts": 96, "layers.*.norm": 16}
