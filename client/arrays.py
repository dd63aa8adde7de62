"""Weights as NumPy arrays over the mapped memory, without torch.

Owns which NumPy dtype stands for each of ours. NumPy itself has neither bfloat16 nor 8-bit floats: the package
``ml_dtypes`` brings them, and without it their bits can be had as unsigned integers. Called by `WeightSet.numpy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import UnsupportedModel
from weightcached.protocol.manifest import Geometry
from weightcached.protocol.memory import host

if TYPE_CHECKING:
    import numpy as np

_FROM_ML_DTYPES = frozenset(name for name in DTYPES if name == "bfloat16" or name.startswith("float8_"))


def array_of(segment: host.Mapping, geometry: Geometry, *, bits: bool, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The array of one row; it keeps the mapping alive. UnsupportedModel where NumPy has no such dtype here."""
    import numpy as np

    itemsize = DTYPES[geometry.dtype].itemsize_bytes
    dtype = np.dtype(f"u{itemsize}") if bits else _dtype(geometry.dtype, name)
    strides = tuple(step * itemsize for step in geometry.stride)
    if not geometry.nbytes:
        return np.ndarray(geometry.shape, dtype)
    return np.ndarray(geometry.shape, dtype, buffer=segment.view(), offset=geometry.offset, strides=strides)


def _dtype(dtype_name: str, name: str) -> np.dtype[Any]:
    import numpy as np

    if dtype_name not in _FROM_ML_DTYPES:
        return np.dtype(dtype_name)
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype_name))
        return found
    except (ImportError, AttributeError) as error:
        raise UnsupportedModel(
            f"NumPy has no {dtype_name} by itself",
            expected="the package ml_dtypes, in a release that has it",
            found=str(error),
            where=name,
            next_step="pip install ml_dtypes, or ask for its bits (bits=True: unsigned integers of the same size), "
            "or for a torch tensor",
        ) from error
