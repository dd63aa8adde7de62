"""What a trainer has: torch tensors (of any device), NumPy arrays, or something that is called for a box of one.

Owns how a box of each comes into a bucket, and that nothing is converted on the way: a tensor of another dtype or shape
than the daemon's plan has is refused. Torch is imported only where a tensor of torch's is given.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from weightcached.protocol.dtypes import itemsize_bytes
from weightcached.protocol.errors import InvalidOption, PushMismatch
from weightcached.protocol.push_messages import WantedTensor
from weightcached.protocol.text import shown

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]
"""Which elements of a tensor: ``tensor[box]``. Every slice has its start and stop, and no step."""

Whole = Union["torch.Tensor", "np.ndarray[Any, Any]"]
Value = Whole | Callable[[Box], Whole]


def named(tensors: Mapping[str, Value] | Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """As pairs, one by one as they are asked for. InvalidOption for what gives none, PushMismatch once it gives
    something else.
    """
    pairs: object = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise InvalidOption("what is to be published are no tensors", expected=_PAIRS, found=type(tensors).__name__)
    return map(_pair, pairs)


_PAIRS = "a mapping from names to tensors, or pairs of a name and a tensor"


def _pair(pair: object) -> tuple[str, Value]:
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str):
        return pair[0], pair[1]
    raise PushMismatch("what is published has no name", expected=_PAIRS, found=type(pair).__name__)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in box)


def start_of(box: Box) -> tuple[int, ...]:
    return tuple(one.start for one in box)


def box_of(start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return tuple(slice(begin, begin + extent) for begin, extent in zip(start, shape, strict=True))


class Given:
    """Elements ``box`` of the tensor that is ``wanted``, as a trainer gave them: whole, or for the asking.

    Raises PushMismatch unless dtype and shape are those of the plan.
    """

    def __init__(self, wanted: WantedTensor, value: Value, box: Box) -> None:
        self._wanted = wanted
        self._value = value
        self._box = box
        self._whole: Whole | None = None
        if not callable(value) or _is_torch(value):
            self._whole = self._checked(value, shape_of(box), what=box if shape_of(box) != wanted.shape else None)

    def copy(self, box: Box, memory: memoryview) -> None:
        """These elements, in C order, into ``memory``, which has their size. ``box`` is of the tensor, and within."""
        if self._whole is None:
            if not callable(self._value):
                raise TypeError(f"no tensor: {type(self._value).__name__}")
            part = self._checked(self._value(box), shape_of(box), what=box)
        else:
            within = tuple(
                slice(one.start - begin, one.stop - begin) for one, begin in zip(box, start_of(self._box), strict=True)
            )
            part = self._whole[within]
        _copy(part, memory, self._wanted.dtype, shape_of(box))

    def _checked(self, value: Any, shape: tuple[int, ...], *, what: Box | None) -> Whole:
        name = shown(self._wanted.name) if what is None else f"{shown(self._wanted.name)}{_words(what)}"
        dtype = dtype_name(value)
        if dtype != self._wanted.dtype:
            raise PushMismatch(
                f"{name} is of another dtype than the checkpoint's",
                expected=self._wanted.dtype,
                found=dtype,
                next_step=f"convert it before it is pushed: tensor.to(torch.{self._wanted.dtype})",
            )
        if unusual := _unusual(value):
            raise PushMismatch(
                f"{name} has no values of its own in memory",
                expected="a dense tensor",
                found=unusual,
                next_step="push its dense form; of one that is sharded its full_tensor(), or each shard with its box",
            )
        found = tuple(value.shape)
        if found == shape:
            return value  # type: ignore[no-any-return]
        if what is None and found in self._wanted.same_as:
            return value.reshape(shape)  # type: ignore[no-any-return]
        raise PushMismatch(f"{name} has another shape than the checkpoint's", expected=list(shape), found=list(found))


def dtype_name(value: Any) -> str:
    """Ours, of a tensor or an array. Raises PushMismatch for what is neither."""
    if _is_torch(value):
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, np.ndarray):
        return str(value.dtype.name)
    raise PushMismatch(
        "what was given is no tensor",
        expected="a torch tensor, a NumPy array, or what gives one for a box",
        found=type(value).__name__,
    )


def _unusual(value: Any) -> str | None:
    """What a tensor of torch's is that cannot be copied element by element; None for all others."""
    if not _is_torch(value):
        return None
    if value.is_meta:
        return "a tensor on the meta device"
    if hasattr(value, "to_local"):
        return f"a {type(value).__name__}"
    return None if str(value.layout) == "torch.strided" else f"a tensor of layout {value.layout}"


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _copy(part: Whole, memory: memoryview, dtype: str, shape: tuple[int, ...]) -> None:
    """Other threads run meanwhile. From a device the copy is torch's; it has ended when this returns."""
    if not math.prod(shape):
        return
    if isinstance(part, np.ndarray):
        np.copyto(np.ndarray(shape, np.dtype(f"u{itemsize_bytes(dtype)}"), memory), _bits(part, dtype))
        return
    import torch

    target = torch.frombuffer(memory, dtype=getattr(torch, dtype)).view(shape)
    target.copy_(part.detach())


def _bits(part: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The same elements as integers of their size: NumPy copies those of every dtype alike, and fast."""
    size = itemsize_bytes(dtype)
    if dtype == "complex64":
        return np.ascontiguousarray(part).view("u8")
    return part.view(f"u{size}")


def _words(box: Box) -> str:
    return f"[{', '.join(f'{one.start}:{one.stop}' for one in box)}]"
