"""An engine's state as rows: names, ties, strides, kinds, places; and what no manifest can describe, by name."""

import pytest
import torch
from torch import nn

from weightcached.loader.engines.state import place_state
from weightcached.protocol.engines import Built, NamedTensor
from weightcached.protocol.errors import UnsupportedModel


def placed(*tensors, module=None):
    named = [tensor if isinstance(tensor, NamedTensor) else NamedTensor(*tensor) for tensor in tensors]
    return place_state(Built(module=module, tensors=named))


def test_a_module_s_parameters_and_buffers_are_rows_in_its_order_with_the_adapter_s_own_after_them():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(3))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
            self.inner = nn.Linear(2, 3, bias=False)
            self.outer = nn.Linear(2, 3, bias=False)
            self.outer.weight = self.inner.weight

    found = placed(NamedTensor("table", torch.ones(4), "attribute"), module=Module())
    assert [(one.name, one.kind, one.persistent, one.alias_of) for one in found.placed] == [
        ("inner.weight", "parameter", True, None),
        ("outer.weight", "parameter", True, "inner.weight"),
        ("positions", "buffer", True, None),
        ("scratch", "buffer", False, None),
        ("table", "attribute", True, None),
    ]
    offsets = [one.offset for one in found.placed]
    assert offsets == [0, 0, 256, 512, 768]
    assert found.segment_nbytes == 1024


def test_an_extent_is_from_the_first_element_to_the_last_whatever_the_strides():
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    cases = {"transposed": whole.t(), "columns": torch.zeros(4, 6)[:, :2], "expanded": torch.zeros(3, 1).expand(3, 5)}
    sizes = {one.name: one.nbytes for one in placed(*cases.items()).placed}
    assert sizes == {"transposed": 24 * 4, "columns": (3 * 6 + 2) * 4, "expanded": 3 * 4}


def test_two_objects_over_the_same_memory_in_the_same_form_are_tied_and_empty_ones_only_if_they_are_one():
    memory, empty = torch.zeros(4, 2), torch.zeros(0, 2)
    found = placed(("a", memory), ("b", memory.view(4, 2)), ("c", empty), ("d", torch.zeros(0, 2)), ("e", empty))
    assert [one.alias_of for one in found.placed] == [None, "a", None, None, "c"]


@pytest.mark.parametrize("other", [lambda t: t.t(), lambda t: t[1:], lambda t: t.view(torch.int32)])
def test_names_that_share_memory_in_different_forms_are_refused_by_name(other):
    memory = torch.zeros(4, 2)
    with pytest.raises(UnsupportedModel, match=r"(b|a) cannot be shared.*a part of that of (a|b)"):
        placed(("a", memory), ("b", other(memory)))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
        ([1.0, 2.0], "list"),
    ],
    ids=["meta", "sparse", "dtype", "conjugate", "no tensor"],
)
def test_what_is_no_dense_tensor_in_host_memory_is_refused_by_name(tensor, said):
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.odd cannot be shared.*{said}"):
        placed(("layers.0.odd", tensor))


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(UnsupportedModel, match="twice"):
        placed(("a", torch.zeros(1)), ("a", torch.zeros(1)))


def test_a_state_without_tensors_has_no_bytes():
    assert placed().segment_nbytes == 0


def test_a_scalar_that_is_none_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"scalar scale cannot be shared.*Tensor"):
        place_state(Built(scalars={"flag": True, "scale": torch.ones(1)}))  # type: ignore[dict-item]
