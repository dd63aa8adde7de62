"""A weight set over an honest grant: names, views, aliases, lifetimes, private writes, digests."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client.conftest import RECEIPTS, TENSORS
from tests.support.resources import memfd_mappings, private_nbytes
from tests.support.weight_sets import plain_row, weights_of_grant, weights_of_rows
from weightcached.client import WeightSet
from weightcached.client.transfer import map_segments
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import TransferError
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.testing import HonestGrant, TensorBytes, honest_grant

Open = Callable[[HonestGrant], WeightSet]


@pytest.fixture
def opened() -> Open:
    return weights_of_grant


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()


def test_every_tensor_has_its_name_form_and_bytes(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as weights:
        assert list(weights) == [*TENSORS, "lm_head.weight"]
        assert len(weights) == len(TENSORS) + 1
        for name, wanted in TENSORS.items():
            tensor = weights[name]
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{wanted.dtype}", wanted.shape)
            assert raw(tensor) == wanted.data
            assert not tensor.requires_grad
        assert weights.resident_bytes == len(grant.segment)
        assert weights.accounting.loaded == tuple(weights)
        assert weights.generation == grant.message.generation
        weights.verify()


def test_asking_twice_or_by_a_tied_name_gives_the_same_object(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as weights:
        assert weights["scale"] is weights["scale"]
        assert weights["lm_head.weight"] is weights["model.norm.weight"]
        assert "scale" in weights
        assert "nothing" not in weights
        with pytest.raises(KeyError):
            weights["nothing"]


def test_all_at_once_are_the_same_objects_in_the_same_order(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as weights:
        asked_before = weights["scale"]
        items = dict(weights.items())
        assert list(items) == list(weights)
        assert items["scale"] is asked_before
        assert items["lm_head.weight"] is items["model.norm.weight"]
        assert all(tensor is weights[name] for name, tensor in items.items())
        assert list(map(id, weights.values())) == list(map(id, items.values()))
        assert {name: raw(items[name]) for name in TENSORS} == {name: one.data for name, one in TENSORS.items()}


def test_ten_threads_that_ask_for_the_same_names_get_the_same_objects(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as weights:
        barrier, seen = threading.Barrier(10), []

        def ask() -> None:
            barrier.wait()
            seen.append([id(weights[name]) for name in weights])

        threads = [threading.Thread(target=ask) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 10
        assert all(ids == seen[0] for ids in seen)


def test_tensors_outlive_the_set_and_the_memory_goes_with_the_last_one(grant: HonestGrant, opened: Open) -> None:
    before = len(memfd_mappings())
    weights = opened(grant)
    kept = weights["codes"][1:]
    weights.close()
    weights.close()
    del weights
    gc.collect()
    assert raw(kept) == TENSORS["codes"].data[5:]
    assert len(memfd_mappings()) == before + 1
    del kept
    gc.collect()
    assert len(memfd_mappings()) == before


def test_a_closed_set_says_so(grant: HonestGrant, opened: Open) -> None:
    weights = opened(grant)
    weights.close()
    with pytest.raises(ValueError, match="closed"):
        weights["codes"]
    with pytest.raises(ValueError, match="closed"):
        weights.values()
    assert "codes" in weights  # the names are known for ever


def test_a_write_stays_with_the_writer(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as one, opened(grant) as other:
        one["codes"].view(torch.uint8).fill_(7)
        assert raw(one["codes"]) == bytes([7] * 15)
        assert raw(other["codes"]) == TENSORS["codes"].data
        other.verify()
        with pytest.raises(TransferError, match="codes"):
            one.verify()


def test_reverting_gives_the_bytes_back_that_were_attached_and_the_memory(grant: HonestGrant, opened: Open) -> None:
    with opened(grant) as weights:
        kept = weights["codes"]
        kept.view(torch.uint8).fill_(7)
        assert private_nbytes() > 0
        weights.revert()
        assert raw(kept) == TENSORS["codes"].data
        assert private_nbytes() == 0
        kept.view(torch.uint8).fill_(8)  # as before
        assert weights.differing() == ["codes"]
        weights.revert()
        weights.verify()
    with pytest.raises(ValueError, match="closed"):
        weights.revert()


def test_strides_overlaps_and_a_ragged_end_are_kept(config: CacheConfig) -> None:
    """A transposed matrix, an expanded row, and a segment whose size is no multiple of any dtype's."""
    values = torch.arange(12, dtype=torch.float32).numpy().tobytes()
    data = values + bytes(512 - len(values)) + b"\1\2\3"
    rows = [
        plain_row("transposed", 0, 48, (4, 3), (1, 4), "float32"),
        plain_row("expanded", 0, 16, (5, 4), (0, 1), "float32"),
        plain_row("tail", 512, 3, (3,), (1,), "uint8"),
        plain_row("hollow", 512, 0, (2, 0), (1, 1), "float64"),
    ]
    with weights_of_rows(rows, data, config=config) as weights:
        matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        assert weights["transposed"].stride() == (1, 4)
        assert torch.equal(weights["transposed"], matrix.T)
        assert torch.equal(weights["expanded"], matrix[0].expand(5, 4))
        assert weights["tail"].tolist() == [1, 2, 3]
        assert weights["hollow"].shape == (2, 0)


def test_a_segment_without_a_byte(config: CacheConfig) -> None:
    rows = [plain_row("hollow", 0, 0, (0, 4), (4, 1), "bfloat16")]
    with weights_of_rows(rows, b"", config=config) as weights:
        assert weights["hollow"].shape == (0, 4)
        assert weights.resident_bytes == 0


def test_tensors_lie_in_host_memory_whatever_the_default_device_is(config: CacheConfig) -> None:
    rows = [plain_row("hollow", 0, 0, (0, 3), (3, 1), "float32"), plain_row("w", 0, 4, (4,), (1,), "uint8", segment=1)]
    with weights_of_rows(rows, b"", b"abcd", config=config) as weights, torch.device("meta"):
        assert {name: tensor.device.type for name, tensor in weights.items()} == {"hollow": "cpu", "w": "cpu"}


@pytest.mark.parametrize("count", [1000])
def test_making_a_thousand_tensors_costs_milliseconds(count: int, config: CacheConfig, opened: Open) -> None:
    """A loose bound, for a regression by an order of magnitude; `make bench` measures."""
    tensors = {f"model.layers.{number}.weight": TensorBytes("bfloat16", (4, 4), bytes(32)) for number in range(count)}
    with honest_grant(tensors, config=config, receipts=RECEIPTS) as grant:
        seconds = []
        for _ in range(5):
            with opened(grant) as weights:
                started = time.perf_counter()
                assert len([weights[name] for name in weights]) == count
                seconds.append(time.perf_counter() - started)
        assert min(seconds) < 0.05


HONEST_TENSORS = {
    "a": TensorBytes("float32", (3, 4), bytes(48)),
    "b": TensorBytes("bfloat16", (7,), bytes(14)),
    "c": TensorBytes("uint8", (5, 2, 2), bytes(20)),
}
WIDTHS = {"segment": 2, "offset": 8, "nbytes": 8, "dtype": 1, "kind": 1, "persistent": 1, "alias": 4, "ndim": 1}
LARGE = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 255, 256, 512, 2**31, 2**32, 2**63 - 1, 2**63])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    column=st.sampled_from([*WIDTHS, "dims", "strides"]),
    position=st.integers(0, 5),
    value=LARGE,
    also=st.none() | st.tuples(st.sampled_from([*WIDTHS, "dims", "strides"]), st.integers(0, 5), LARGE),
)
def test_no_manifest_makes_a_tensor_that_reaches_out_of_its_segment(
    column: str, position: int, value: int, also: tuple[str, int, int] | None, config: CacheConfig, fuzzed: HonestGrant
) -> None:
    """Numbers of any column replaced by any others: refused, or every tensor lies in the memory that was granted."""
    top = msgpack.unpackb(fuzzed.manifest)
    for name, number, new in [(column, position, value), *([also] if also else [])]:
        width = WIDTHS.get(name, 8)
        data = bytearray(top["columns"][name])
        start = number * width % len(data)
        data[start : start + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
        top["columns"][name] = bytes(data)
    try:
        manifest = Manifest.decode(msgpack.packb(top))
    except TransferError:
        return
    segments = map_segments([fuzzed.fds[1]], [len(fuzzed.segment)])
    weights = WeightSet(manifest, segments, source="disk", version="v", receipts_version="r", lease=None)
    first, last = segments[0].address, segments[0].address + segments[0].nbytes
    lies = 0
    with weights:
        for name in weights:
            try:
                tensor = weights[name]
            except TransferError:
                lies += 1
                continue
            if tensor.numel():
                extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                assert first <= tensor.data_ptr()
                assert tensor.data_ptr() + extent * tensor.itemsize <= last
        if lies:
            with pytest.raises(TransferError):
                weights.values()
        else:
            assert len(weights.values()) == len(weights)


@pytest.fixture
def fuzzed(config: CacheConfig) -> Iterator[HonestGrant]:
    with honest_grant(HONEST_TENSORS, config=config, receipts=RECEIPTS) as grant:
        yield grant
