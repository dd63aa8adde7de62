"""Binding weights into a ``torch.nn.Module`` that was built without any.

Owns :func:`bind` and :func:`meta_parameters`. Parameters are bound shared: the module computes with the mapped memory
itself. Buffers are copied, because engines write to them. All checks come before the first change, so after an error
the module is what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from weightcached.client.weights import WeightSet
from weightcached.protocol.errors import BindError

if TYPE_CHECKING:
    import torch

_NAMES_SHOWN = 20


@dataclass(frozen=True)
class BindReport:
    """What :func:`bind` did. Tied names are counted in ``bound`` each, their bytes once."""

    bound: tuple[str, ...]
    """Names whose parameter is the shared memory now."""
    copied: tuple[str, ...]
    """Names of buffers whose values were copied from the weights."""
    ignored: tuple[str, ...]
    """Names of weights that were left over and allowed to be."""
    nbytes_shared: int
    nbytes_copied: int
    kept: tuple[str, ...] = ()
    """Names of parameters that the weights lack and that were allowed to stay as they are."""


@dataclass
class _Group:
    """One tensor of the module and every name it has: tied names are one tensor."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    source: str | None = None
    """The name in the weights that it gets its values from."""


def bind(
    module: torch.nn.Module,
    weights: WeightSet,
    *,
    ignore_unexpected: Iterable[str] = (),
    keep_missing: Collection[str] = (),
) -> BindReport:
    """Make every parameter of ``module`` the one of ``weights`` with its name, and copy persistent buffers that are
    there.

    Tied parameters stay one ``nn.Parameter`` at all their names; gradients are off. A parameter that has memory stays
    the object that it is, with its class and its attributes, and gives its memory up; one on the meta device is
    replaced. A weight that the module has no use for is allowed where its whole name matches a pattern of
    ``ignore_unexpected`` (``*`` and ``?`` as in file names). A parameter with a name in ``keep_missing`` that the
    weights lack keeps the values it was built with.

    Raises one BindError that names everything that does not fit (a parameter missing from the weights, a weight left
    over, another shape or dtype, tied names whose weights differ, anything that would stay on the meta device), with
    ``module`` unchanged. The module keeps the memory alive; the lease is the weight set's.
    """
    parameters = _groups(module.named_parameters(remove_duplicate=False))
    buffers = _groups(
        (name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if _is_persistent(module, name)
    )
    problems = [
        *_match_parameters(parameters, weights, keep_missing),
        *_match_buffers(buffers, weights),
        *_left_on_meta(module, buffers),
    ]
    used = {name for group in (*parameters, *buffers) for name in group.names}
    patterns = tuple(ignore_unexpected)
    left_over = [name for name in weights if name not in used]
    ignored = tuple(name for name in left_over if any(fnmatchcase(name, pattern) for pattern in patterns))
    problems += [f"{name}: left over, the module has no such parameter" for name in left_over if name not in ignored]
    if problems:
        raise _misfit(problems, module)
    return _apply(module, weights, parameters, buffers, ignored)


def _groups(named: Iterable[tuple[str, torch.Tensor]]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), _Group(tensor)).names.append(name)
    return list(groups.values())


def _is_persistent(module: torch.nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf not in module.get_submodule(owner)._non_persistent_buffers_set


def _match_parameters(groups: list[_Group], weights: WeightSet, keep_missing: Collection[str]) -> Iterator[str]:
    from torch.nn.parameter import is_lazy

    for group in groups:
        present = [name for name in group.names if name in weights]
        if not present and not group.tensor.is_meta and any(name in keep_missing for name in group.names):
            continue
        if not present:
            yield f"{' = '.join(group.names)}: missing from the weights"
        elif is_lazy(group.tensor):
            yield f"{present[0]}: not initialised, its shape is not known before a first forward pass"
        else:
            group.source = present[0]
            yield from _other_form(group, weights)
            yield from _tied_apart(present, weights)


def _match_buffers(groups: list[_Group], weights: WeightSet) -> Iterator[str]:
    for group in groups:
        present = [name for name in group.names if name in weights]
        if present:
            group.source = present[0]
            yield from _other_form(group, weights)
            yield from _tied_apart(present, weights)


def _other_form(group: _Group, weights: WeightSet) -> Iterator[str]:
    geometry = weights.manifest.geometry(group.source or "")
    wanted = f"{str(group.tensor.dtype).removeprefix('torch.')}{list(group.tensor.shape)}"
    found = f"{geometry.dtype}{list(geometry.shape)}"
    if wanted != found:
        yield f"{group.source}: the module has {wanted}, the weights have {found}"


def _tied_apart(names: list[str], weights: WeightSet) -> Iterator[str]:
    """Tied names may lie in several places (a checkpoint that stores both), if the same bytes are there."""
    rows = [weights.manifest.row(name) for name in names]
    if any((row.digest, row.nbytes, row.stride) != (rows[0].digest, rows[0].nbytes, rows[0].stride) for row in rows):
        yield f"{' = '.join(names)}: tied in the module, but the weights have different bytes for these names"


def _left_on_meta(module: torch.nn.Module, persistent: list[_Group]) -> Iterator[str]:
    covered = {id(group.tensor) for group in persistent if group.source is not None}
    for name, buffer in module.named_buffers():
        if buffer.is_meta and id(buffer) not in covered:
            yield f"{name}: a buffer on the meta device that the weights do not have"


def _misfit(problems: list[str], module: torch.nn.Module) -> BindError:
    more = len(problems) - _NAMES_SHOWN
    shown = "; ".join(problems[:_NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return BindError(
        f"the weights do not fit the module in {len(problems)} places",
        expected="a weight of the same shape and dtype for each parameter, and none left over",
        found=shown,
        where=type(module).__name__,
        next_step="build the module from the same config.json, dtype and layout that the weights were attached with",
    )


def _apply(
    module: torch.nn.Module,
    weights: WeightSet,
    parameters: list[_Group],
    buffers: list[_Group],
    ignored: tuple[str, ...],
) -> BindReport:
    import torch

    shared = {}
    tensors = [(group, weights[group.source]) for group in parameters if group.source is not None]
    copies = [(group, weights[group.source]) for group in buffers if group.source is not None]
    for group, tensor in tensors:
        shared[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        if not group.tensor.is_meta:
            group.tensor.data = tensor
            group.tensor.requires_grad_(False)
            continue
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        for name in group.names:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, parameter)
    with torch.no_grad():
        for group, tensor in copies:
            _fill_buffer(module, group, tensor)
    return BindReport(
        bound=tuple(name for group, _ in tensors for name in group.names),
        copied=tuple(name for group, _ in copies for name in group.names),
        ignored=ignored,
        nbytes_shared=sum(shared.values()),
        nbytes_copied=sum(tensor.nbytes for _, tensor in copies),
        kept=tuple(name for group in parameters if group.source is None for name in group.names),
    )


def _fill_buffer(module: torch.nn.Module, group: _Group, tensor: torch.Tensor) -> None:
    if not group.tensor.is_meta:
        group.tensor.copy_(tensor)
        return
    own = tensor.clone()
    for name in group.names:
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_buffer(leaf, own, persistent=True)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built in this block, by this thread, have their parameters on the meta device, and their buffers real.

    Buffers such as rotary frequencies are in no checkpoint and have to be computed; parameters would only cost memory
    and time until :func:`bind` replaces them. A parameter that a module registers under two names stays one parameter.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from torch.nn.parameter import is_lazy
    from torch.utils.weak import WeakTensorKeyDictionary

    thread = threading.get_ident()
    moved = WeakTensorKeyDictionary()

    def to_meta(_: torch.nn.Module, __: str, parameter: torch.nn.Parameter | None) -> Any:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in moved:
            moved[parameter] = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return moved[parameter]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()
