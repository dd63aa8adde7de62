"""An engine's state as rows: names, ties, strides, kinds, places; and what no manifest can describe, by name."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def without_memory(tensor, nbytes=0):
    """As frameworks leave a tensor whose memory they have freed: the form of one, and less memory."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
        ([1.0, 2.0], "list"),
        (without_memory(torch.zeros(2)), "0 bytes"),
        (without_memory(torch.zeros(8)[4:], nbytes=24), "24 bytes"),
        (FakeTensorMode().from_tensor(torch.zeros(2)), "memory on meta"),
    ],
    ids=["meta", "sparse", "dtype", "conjugate", "no tensor", "freed", "cut", "fake"],
)
def test_what_is_no_dense_tensor_in_host_memory_is_refused_by_name(tensor, said):
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.odd cannot be shared.*{said}"):
        placed(("layers.0.odd", tensor))


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(UnsupportedModel, match="twice"):
        placed(("a", torch.zeros(1)), ("a", torch.zeros(1)))


def test_a_state_without_tensors_has_no_bytes():
    assert placed().segment_nbytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"odd cannot be shared.*nested"):
        placed(("odd", torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])))


def test_a_tensor_without_elements_needs_no_memory():
    assert placed(("a", without_memory(torch.zeros(4))[2:2])).segment_nbytes == 0


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (NamedTensor("", torch.zeros(1)), "not empty"),
        (NamedTensor(3, torch.zeros(1)), "tensor 3 cannot"),  # type: ignore[arg-type]
        (NamedTensor("\udcff", torch.zeros(1)), r"udcff.*UTF-8"),
        (NamedTensor("a", torch.zeros(1), "weight"), r"tensor a cannot.*kind 'weight'"),  # type: ignore[arg-type]
        (NamedTensor("a", torch.zeros(1), "buffer", "no"), r"tensor a cannot.*persistent 'no'"),  # type: ignore[arg-type]
        (("a", torch.zeros(1)), "NamedTensor.*tuple"),
    ],
    ids=["empty", "a number", "not UTF-8", "kind", "persistent", "a pair"],
)
def test_a_name_that_no_row_can_have_is_refused(named, said):
    with pytest.raises(UnsupportedModel, match=said):
        place_state(Built(tensors=[named]))


@pytest.mark.parametrize(
    ("scalars", "said"),
    [
        ({"scale": torch.ones(1)}, "scalar scale cannot be shared.*Tensor"),
        ({"scale": 2**63}, "scalar scale cannot.*int 9223372036854775808"),
        ({"scale": float("nan")}, "scalar scale cannot.*float nan"),
        ({"scale": float("-inf")}, "scalar scale cannot.*float -inf"),
        ({"scale": "\udcff"}, "scalar scale cannot.*udcff"),
        ({1: True}, "scalar 1 cannot.*name"),
        ({"": True}, "name that is text"),
    ],
    ids=["a tensor", "too large", "nan", "infinite", "not UTF-8", "a name that is a number", "no name"],
)
def test_a_scalar_that_no_manifest_can_hold_is_refused_by_name(scalars, said):
    with pytest.raises(UnsupportedModel, match=said):
        place_state(Built(scalars={"flag": True, "least": -(2**63), "none": None, **scalars}))
