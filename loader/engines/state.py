"""An engine's state as rows: which tensors it is, under which names, what is tied, and where each lies in a segment.

Pure, but for looking at tensors' forms: copies nothing. Refuses by name what no manifest can describe. The order is
that of the module and of the adapter's own tensors, so that the same state always has the same offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from weightcached.loader.engines.returned import refused, require_named, require_scalars
from weightcached.loader.layout import aligned
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.engines import Built, NamedTensor
from weightcached.protocol.manifest import Kind, extent_nbytes


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One name of the state, and its place. An alias has its target's tensor and place."""

    name: str
    tensor: Any
    """A ``torch.Tensor``."""
    offset: int
    nbytes: int
    dtype: str
    kind: Kind
    persistent: bool
    alias_of: str | None


@dataclass(frozen=True, slots=True)
class PlacedState:
    """Every name's place, and the segment's size (a multiple of the alignment; may be 0)."""

    placed: tuple[PlacedTensor, ...]
    segment_nbytes: int
    gpu: int | None = None
    """The number, in this process, of the GPU that tensors may be on beside host memory; None: of no GPU."""

    def with_tensors_of(self, built: Built) -> PlacedState:
        """The same places for the tensors of ``built``. Raises UnsupportedModel unless names and forms are the same,
        and what was tied still is.
        """
        now = {one.name: one for one in place_state(built, gpu=self.gpu).placed}
        before = {one.name: one for one in self.placed}
        for name in [*before, *(now.keys() - before.keys())]:
            ties = name in before and before[name].alias_of is not None
            forms = [_form(state[name], ties=ties) if name in state else None for state in (before, now)]
            if forms[0] != forms[1]:
                raise refused(name, f"the form it had before it was filled: {forms[0]}", str(forms[1]))
        return replace(self, placed=tuple(replace(one, tensor=now[one.name].tensor) for one in self.placed))


def _form(one: PlacedTensor, *, ties: bool) -> tuple[object, ...]:
    form = (one.dtype, tuple(one.tensor.shape), one.tensor.stride(), one.kind, one.persistent)
    return (*form, f"tied to {one.alias_of}") if ties else form


def place_state(built: Built, *, gpu: int | None = None) -> PlacedState:
    """Lay what was built one tensor after the other, each aligned, tied names in one place. Tensors may lie in host
    memory, and on the GPU with the number ``gpu``, where the weights are to live there.

    Raises UnsupportedModel naming a tensor that cannot be shared, a name that stands twice, names that share memory in
    different forms, and names and scalars that no manifest can hold.
    """
    require_scalars(built.scalars)
    placed: dict[str, PlacedTensor] = {}
    first_of: dict[tuple[object, ...], PlacedTensor] = {}
    end = 0
    for named in map(require_named, _named_tensors(built)):
        name, tensor = named.name, named.tensor
        if name in placed:
            raise refused(name, "a name that no other tensor has", "the name stands twice")
        dtype = _checked_dtype(name, tensor, gpu)
        place = _identity(tensor)
        target = first_of.get(place)
        if target is not None:
            offset, nbytes, alias_of = target.offset, target.nbytes, target.name
        else:
            nbytes = extent_nbytes(tuple(tensor.shape), tensor.stride(), DTYPES[dtype].itemsize_bytes)
            offset, alias_of = end, None
            end = aligned(end + nbytes)
        placed[name] = PlacedTensor(name, tensor, offset, nbytes, dtype, named.kind, named.persistent, alias_of)
        first_of.setdefault(place, placed[name])
    _require_apart(first_of.values())
    return PlacedState(tuple(placed.values()), end, gpu)


def _named_tensors(built: Built) -> Iterator[NamedTensor]:
    """The module's parameters, then its buffers, then the adapter's own."""
    module = built.module
    if module is not None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield NamedTensor(name, parameter)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            persistent = leaf not in module.get_submodule(owner)._non_persistent_buffers_set
            yield NamedTensor(name, buffer, "buffer", persistent)
    yield from built.tensors


def _checked_dtype(name: str, tensor: Any, gpu: int | None) -> str:
    """Our name of its dtype, if it is a tensor whose elements lie in memory that can be copied, as its strides say."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not isinstance(tensor, torch.Tensor):
        raise refused(name, "a torch.Tensor", type(tensor).__name__)
    if is_traceable_wrapper_subclass(tensor):
        raise refused(name, "one dense tensor", f"{type(tensor).__name__}, which wraps others")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        form = "nested" if tensor.is_nested else f"layout {tensor.layout}"
        raise refused(name, "a dense tensor", f"{form}, dtype {tensor.dtype}")
    storage = tensor.untyped_storage()
    usable = ("cpu",) if gpu is None else ("cpu", f"cuda:{gpu}")
    if not {str(tensor.device), str(storage.device)} <= set(usable):
        expected = "a tensor in host memory" if gpu is None else f"a tensor in host memory, or on {usable[-1]}"
        raise refused(name, expected, f"device {tensor.device}, memory on {storage.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise refused(name, "elements as they lie in memory", "a conjugate or negated view")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise refused(name, f"a dtype of {', '.join(DTYPES)}", dtype)
    extent = extent_nbytes(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
    begin = tensor.storage_offset() * tensor.itemsize
    if extent and begin + extent > storage.nbytes():  # reading it would be a segmentation fault
        raise refused(name, f"memory for its elements, {begin + extent} bytes", f"{storage.nbytes()} bytes")
    return dtype


def _identity(tensor: Any) -> tuple[object, ...]:
    """Equal for tensors that are the same elements in the same form. Those without elements have no place to share."""
    form = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (tensor.data_ptr(), *form) if tensor.numel() else (id(tensor), *form)


def _require_apart(places: Iterable[PlacedTensor]) -> None:
    """No two places may share memory: copied apart, what is written through one name would not be seen by the other."""
    by_address = sorted((one for one in places if one.nbytes), key=lambda one: int(one.tensor.data_ptr()))
    end, last = 0, ""
    for one in by_address:
        address = int(one.tensor.data_ptr())
        if address < end:
            raise refused(
                one.name, "memory of its own, or another name's in the very same form", f"a part of that of {last}"
            )
        end, last = address + one.nbytes, one.name
