"""Reading: a slab's reads, carried out on real files, bring what numpy would, columns made of rows included."""

import contextlib
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import naive
from tests.support.checkpoints import tiny_config
from tests.support.partitions import header, partitioned
from tests.support.plans import cache_config
from weightcached.loader import reading
from weightcached.loader.access import Buffered, Direct, Mapped
from weightcached.loader.accounting import account
from weightcached.loader.boxes import Box, whole
from weightcached.loader.planned import Copy, LoadPlan, PlannedParameter, TensorHeader
from weightcached.loader.reading import ALONE_NBYTES, Reader, extents, requests
from weightcached.loader.slabs import slabs
from weightcached.protocol.errors import TruncatedFile


@contextlib.contextmanager
def files_of(tensors, offset=64):
    """Name → descriptor of a file that holds this tensor alone, from byte ``offset``."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name, values in tensors.items():
            files[name] = os.memfd_create(name)
            stack.callback(os.close, files[name])
            os.pwrite(files[name], values.tobytes(), offset)
        yield files


def filled(parameter, tensors, slab_nbytes=1 << 20, way=Buffered):
    """(array, bytes read) of the parameter, from real files."""
    made, read_nbytes = [], 0
    with files_of(tensors) as files:
        reader = Reader(way(files))
        for slab in slabs(parameter, slab_nbytes=slab_nbytes):
            buffer = bytearray(b"\xff" * slab.source_nbytes)
            read_nbytes += reader.fill(slab, memoryview(buffer))
            made.append(np.frombuffer(bytes(buffer), parameter.dtype))
    return np.concatenate(made).reshape(parameter.shape), read_nbytes


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(partitioned(), st.integers(1, 40), st.integers(1, 12), st.sampled_from([Buffered, Direct, Mapped]))
def test_any_partition_is_read_as_numpy_would(monkeypatch, case, slab_nbytes, band_nbytes, way):
    monkeypatch.setattr(reading, "BAND_NBYTES", band_nbytes)
    parameter, tensors = case
    plan = LoadPlan(cache_config(tiny_config()), (parameter,), account(expected=(), present=(), ignored={}))
    got, _ = filled(parameter, tensors, slab_nbytes, way)
    assert (got == naive.execute(plan, tensors)["p"]).all()


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "complex64"])
@pytest.mark.parametrize("rows", [700, ALONE_NBYTES])
def test_a_transposed_part_is_read_once_whatever_its_size(dtype, rows):
    """Rows in the file are as long as a part is high: bands of many short ones, or of one long one."""
    values = (np.arange(90 * 3 * rows) % 2039).reshape(90, 3 * rows).astype(dtype)
    copy = Copy(header("t", values.shape, dtype), Box((10, rows), (70, rows)), whole((rows, 70)), transposed=True)
    parameter = PlannedParameter("p", (rows, 70), dtype, dtype, (copy,))
    got, read_nbytes = filled(parameter, {"t": values})
    assert (got == values[10:80, rows : 2 * rows].T).all()
    assert got.nbytes <= read_nbytes <= sum(nbytes for _, nbytes in requests(parameter)) <= values.nbytes


def test_parts_stand_beside_each_other_as_columns_of_many_matrices():
    """What two halves of one rank's experts need: each expert transposed, halves one below the other."""
    values = np.arange(3 * 40 * 50, dtype=np.int16).reshape(3, 40, 50)
    tensor = header("t", values.shape)
    halves = tuple(
        Copy(tensor, Box((0, 0, 30 * half), (3, 40, 20)), Box((0, 20 * half, 0), (3, 20, 40)), transposed=True)
        for half in range(2)
    )
    parameter = PlannedParameter("p", (3, 40, 40), "int16", "int16", halves)
    wanted = np.concatenate([values[:, :, :20], values[:, :, 30:]], axis=2).swapaxes(1, 2)
    assert (filled(parameter, {"t": values})[0] == wanted).all()


def test_a_file_that_ends_within_a_transposed_part_is_truncated_by_name():
    values = np.ones((30, 20), np.int16)
    copy = Copy(header("t", (31, 20)), whole((31, 20)), whole((20, 31)), transposed=True)
    with pytest.raises(TruncatedFile, match="'t'") as caught:
        filled(PlannedParameter("p", (20, 31), "int16", "int16", (copy,)), {"t": values})
    assert caught.value.where == "t"


def parameter_of(tensor, box):
    return PlannedParameter(tensor.name, box.shape, tensor.dtype, tensor.dtype, (Copy(tensor, box, whole(box.shape)),))


def test_extents_are_what_lies_together_in_a_file():
    """Two tensors side by side and one elsewhere; of two more a part of each row, too long to read the gaps and not."""
    shape = (64, 64)
    beside = [TensorHeader(name, "int16", shape, "f", at, 8192) for name, at in [("a", 8), ("b", 8200), ("c", 20000)]]
    wide = TensorHeader("d", "uint8", (3, 2 * ALONE_NBYTES), "g", 0, 6 * ALONE_NBYTES)
    narrow = TensorHeader("e", "uint8", (30, 2000), "h", 0, 60000)
    parameters = [
        *(parameter_of(tensor, whole(shape)) for tensor in beside),
        parameter_of(wide, Box((0, 0), (3, ALONE_NBYTES))),
        parameter_of(narrow, Box((0, 1000), (30, 1000))),
    ]
    reads = [read for one in parameters for slab in slabs(one, slab_nbytes=3000) for read in slab.reads]
    rows = [("g", 2 * row * ALONE_NBYTES, ALONE_NBYTES) for row in range(3)]
    assert list(extents(reads)) == [("f", 8, 16384), ("f", 20000, 8192), *rows, ("h", 1000, 59000)]
    assert next(extents(reads[1:])) == ("f", 3008, 13384)
    assert list(extents([])) == []
