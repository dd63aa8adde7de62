"""NumPy arrays over mapped weights: dtypes, bits, lifetimes, private writes, DLPack, and not a line of torch."""

import gc
import subprocess
import sys
from typing import Any

import ml_dtypes  # noqa: F401  # there, so that what comes without it is a test of its own
import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from tests.client.conftest import TENSORS
from tests.support.daemons import Daemon
from tests.support.resources import memfd_mappings, private_nbytes
from tests.support.unprivileged import ROOT
from tests.support.weight_sets import plain_row, weights_of_grant, weights_of_rows
from weightcached.client.arrays import _FROM_ML_DTYPES
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.testing import HonestGrant

BY_NUMPY = sorted(DTYPES.keys() - _FROM_ML_DTYPES)


def row_of(dtype: str) -> Any:
    return plain_row("w", 0, 6 * DTYPES[dtype].itemsize_bytes, (2, 3), (3, 1), dtype)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_numpys_or_that_of_ml_dtypes_and_has_bits(dtype: str, config: CacheConfig) -> None:
    itemsize = DTYPES[dtype].itemsize_bytes
    data = bytes(number % 2 for number in range(6 * itemsize))
    with weights_of_rows([row_of(dtype)], data, config=config) as weights:
        array, bits = weights.numpy("w"), weights.numpy("w", bits=True)
        assert (array.dtype.name, array.shape, array.tobytes()) == (dtype, (2, 3), data)
        assert (bits.dtype, bits.tobytes()) == (np.dtype(f"u{itemsize}"), data)
        if not array.dtype.name.startswith(("float8", "uint", "complex")):
            assert array.astype(np.float64).tolist() == weights["w"].to(torch.float64).tolist()


@pytest.mark.parametrize("dtype", sorted(_FROM_ML_DTYPES))
def test_without_ml_dtypes_the_way_out_is_named(
    dtype: str, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    data = bytes(6 * DTYPES[dtype].itemsize_bytes)
    with weights_of_rows([row_of(dtype)], data, config=config) as weights:
        with pytest.raises(UnsupportedModel, match=rf"no {dtype} .*where: w; .*pip install ml_dtypes, or .*bits=True"):
            weights.numpy("w")
        assert weights.numpy("w", bits=True).tobytes() == data


def test_strides_tied_names_and_no_element(config: CacheConfig) -> None:
    values = np.arange(12, dtype=np.float32)
    rows = [
        plain_row("transposed", 0, 48, (4, 3), (1, 4), "float32"),
        plain_row("tied", 0, 48, (4, 3), (1, 4), "float32", alias_of="transposed"),
        plain_row("expanded", 0, 16, (5, 4), (0, 1), "float32"),
        plain_row("hollow", 0, 0, (2, 0), (1, 1), "float64"),
        plain_row("scalar", 256, 4, (), (), "float32"),
    ]
    with weights_of_rows(rows, values.tobytes() + bytes(208) + b"\0\0\x80\x3f", config=config) as weights:
        assert (weights.numpy("transposed") == values.reshape(3, 4).T).all()
        assert np.shares_memory(weights.numpy("transposed"), weights.numpy("tied"))
        assert weights.numpy("expanded").tolist() == [[0, 1, 2, 3]] * 5
        assert weights.numpy("hollow").shape == (2, 0)
        assert weights.numpy("scalar") == 1
        with pytest.raises(KeyError):
            weights.numpy("nothing")


def test_arrays_outlive_the_set_and_the_memory_goes_with_the_last_view(grant: HonestGrant) -> None:
    before = len(memfd_mappings())
    weights = weights_of_grant(grant)
    kept = weights.numpy("codes", bits=True)[1:]
    weights.close()
    with pytest.raises(ValueError, match="closed"):
        weights.numpy("codes", bits=True)
    del weights
    gc.collect()
    assert kept.tobytes() == TENSORS["codes"].data[5:]
    assert len(memfd_mappings()) == before + 1
    del kept
    gc.collect()
    assert len(memfd_mappings()) == before


def test_a_write_stays_with_the_writer(grant: HonestGrant) -> None:
    with weights_of_grant(grant) as one, weights_of_grant(grant) as other:
        assert private_nbytes() == 0
        one.numpy("scale")[...] = 7
        assert [one["scale"].item(), other["scale"].item(), other.numpy("scale").item()] == [7, 1, 1]
        assert 0 < private_nbytes() <= 64 << 10  # a page; of 64 KiB on some machines
        other.verify()


def test_arrays_and_tensors_go_through_dlpack_without_a_copy(grant: HonestGrant) -> None:
    """What DLPack carries outlives the set too. bfloat16, which NumPy cannot give, goes from torch."""
    before = len(memfd_mappings())
    weights = weights_of_grant(grant)
    scale = from_dlpack(weights.numpy("scale"))
    assert scale.data_ptr() == weights["scale"].data_ptr()
    array = np.from_dlpack(weights["scale"])
    assert array.ctypes.data == weights["scale"].data_ptr()
    bf16 = from_dlpack(weights["model.norm.weight"].__dlpack__())
    assert (bf16.dtype, bf16.data_ptr()) == (torch.bfloat16, weights["model.norm.weight"].data_ptr())
    weights.close()
    del weights, array
    gc.collect()
    assert scale.item() == 1
    assert bytes(bf16.view(torch.uint8).tolist()) == TENSORS["model.norm.weight"].data
    del scale
    gc.collect()
    assert len(memfd_mappings()) == before + 1
    del bf16
    gc.collect()
    assert len(memfd_mappings()) == before


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as where it is not installed
from weightcached.client import attach
weights = attach(sys.argv[1], mode="require", runtime_dir=sys.argv[2], timeout_s=30)
names = list(weights.keys())
assert len(weights) == len(names) and names[0] in weights and "nothing" not in weights
for name in names:
    array = weights.numpy(name, bits=True)
    assert array.nbytes == weights.manifest.row(name).nbytes
weights.verify()
weights.close()
print(weights.source, array.dtype)
"""


def test_an_engine_without_torch_attaches_and_computes(steady_daemon: Daemon) -> None:
    arguments = [str(steady_daemon.model_dir), str(steady_daemon.place.runtime_dir)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("daemon uint")
