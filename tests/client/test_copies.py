"""Weights for an engine that copies: in whose memory they are, in which order they come, what stays of them."""

import copy
import gc

import pytest
import torch

from tests.client.conftest import TENSORS
from tests.support.resources import memfd_mappings, private_nbytes
from tests.support.weight_sets import plain_row, weights_of_grant, weights_of_rows
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.testing import HonestGrant


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


REUSE = pytest.mark.parametrize("reuse_memory", [False, True])


@REUSE
def test_a_module_loads_its_weights_from_copies(grant: HonestGrant, reuse_memory: bool) -> None:
    """As engines do: each parameter is looked up by name and copied into memory that the engine has already."""
    own = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for name, tensor in TENSORS.items()}
    own["lm_head.weight"] = torch.empty_like(own["model.norm.weight"])
    with weights_of_grant(grant) as weights:
        for name, tensor in weights.copies(reuse_memory=reuse_memory):
            own[name].copy_(tensor)
    assert torch.equal(own.pop("lm_head.weight"), own["model.norm.weight"])
    assert {name: raw(tensor) for name, tensor in own.items()} == {name: one.data for name, one in TENSORS.items()}


@REUSE
def test_what_a_consumer_does_to_copies_reaches_nobody(grant: HonestGrant, reuse_memory: bool) -> None:
    with weights_of_grant(grant) as weights:
        for _, tensor in weights.copies(reuse_memory=reuse_memory):
            tensor.zero_()
        assert private_nbytes() == 0
        weights.verify()


def test_copies_outlive_the_memory_they_were_made_of(grant: HonestGrant) -> None:
    before = len(memfd_mappings())
    weights = weights_of_grant(grant)
    kept = dict(weights.copies())
    weights.close()
    del weights
    gc.collect()
    assert len(memfd_mappings()) == before
    for name, wanted in TENSORS.items():
        assert kept[name].untyped_storage().nbytes() == len(wanted.data)
        assert raw(kept[name]) == wanted.data
    assert kept["lm_head.weight"].data_ptr() == kept["model.norm.weight"].data_ptr()


def test_copies_are_pickled_by_themselves_and_mapped_tensors_with_all_of_their_segment(grant: HonestGrant) -> None:
    """So the documentation says what to pickle."""
    with weights_of_grant(grant) as weights:
        for name, tensor in weights.copies():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert copy.deepcopy(tensor).untyped_storage().nbytes() == tensor.nbytes
            assert copy.deepcopy(weights[name]).untyped_storage().nbytes() == len(grant.segment)


def test_reused_memory_is_that_of_the_largest(grant: HonestGrant) -> None:
    with weights_of_grant(grant) as weights:
        storages = [tensor.untyped_storage() for _, tensor in weights.copies(reuse_memory=True)]
        (piece,) = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
        assert piece[1] == max(len(tensor.data) for tensor in TENSORS.values())


def test_copies_come_in_the_order_of_the_memory_and_keep_their_strides(config: CacheConfig) -> None:
    """Whatever the manifest's order: two segments, a transposed matrix, an expanded row, a tied name, no element."""
    values = torch.arange(12, dtype=torch.float32)
    first = values.numpy().tobytes() + bytes(256 - 48) + bytes(range(64))
    rows = [
        plain_row("second segment", 0, 4, (4,), (1,), "uint8", segment=1),
        plain_row("later", 256, 64, (8, 4), (4, 1), "float16"),
        plain_row("transposed", 0, 48, (4, 3), (1, 4), "float32"),
        plain_row("tied", 0, 48, (4, 3), (1, 4), "float32", alias_of="transposed"),
        plain_row("expanded", 256, 16, (5, 4), (0, 1), "float32"),
        plain_row("hollow", 256, 0, (0, 3), (3, 1), "bfloat16"),
    ]
    with weights_of_rows(rows, first, b"abcd", config=config) as weights:
        for reuse_memory in (False, True):
            seen = []
            for name, tensor in weights.copies(reuse_memory=reuse_memory):
                seen.append(name)
                assert (tensor.shape, tensor.stride()) == (weights[name].shape, weights[name].stride())
                assert torch.equal(tensor, weights[name])
            assert seen == ["transposed", "tied", "later", "expanded", "hollow", "second segment"]


@REUSE
def test_copies_lie_in_host_memory_whatever_the_default_device_is(grant: HonestGrant, reuse_memory: bool) -> None:
    with weights_of_grant(grant) as weights, torch.device("meta"):
        for name, tensor in weights.copies(reuse_memory=reuse_memory):
            assert tensor.device.type == "cpu"
            assert tensor.equal(weights[name])


def test_a_closed_set_makes_no_more_copies(grant: HonestGrant) -> None:
    weights = weights_of_grant(grant)
    rest = weights.copies()
    name, kept = next(rest)
    weights.close()
    with pytest.raises(ValueError, match="closed"):
        next(rest)
    assert kept.nbytes == len(TENSORS[name].data)
