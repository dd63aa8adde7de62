"""Whether a module of Transformers can have its parameters where the weights lie, asked before and after it loads.

Before: what a load asks for that mapped memory cannot give, and tensors that Transformers would have to convert or
cast, which would make copies. After: that every parameter that the weights have is in their memory. Each refusal names
what it is about. Looks at modules and at Transformers' own rules for names; changes only buffers
(:func:`give_buffers_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightcached.protocol.errors import BindError, InvalidOption, UnsupportedModel

if TYPE_CHECKING:
    import torch

_NAMES_SHOWN = 8
ENGINE_MADE = (
    "keep the state that Transformers makes of them: weightcached serve --engine transformers, and "
    'layout="transformers" here'
)


def require_plain(load_config: Any, state_dict: object, device: torch.device) -> None:
    """Raises InvalidOption for arguments of ``from_pretrained`` that cannot be honoured with memory that is mapped, on
    ``device``.
    """
    elsewhere = {str(one) for one in (load_config.device_map or {}).values() if not _is_on(one, device)}
    quantizer = load_config.hf_quantizer
    asked = {
        "device_map": elsewhere and f"{', '.join(sorted(elsewhere))}, and weights on {device}",
        "device_mesh, tp_plan or distributed_config": load_config.device_mesh is not None and "a device mesh",
        "quantization_config": quantizer is not None and not quantizer.pre_quantized and "quantization while loading",
        "state_dict": state_dict is not None and "weights of its own",
    }
    for option, value in asked.items():
        if value:
            raise refused(option, value)


def _is_on(asked: Any, device: torch.device) -> bool:
    """Whether a value of a ``device_map`` means ``device``: a number is a GPU's, and a kind alone the one at hand."""
    import torch

    try:
        named = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):  # `disk`
        return False
    return named.type == device.type and (named.index is None or named.index == (device.index or 0))


def require_mappable(model: Any, tensors: Mapping[str, torch.Tensor], load_config: Any) -> None:
    """Asked before anything is converted: UnsupportedModel names the tensors that Transformers would convert, BindError
    those that it would cast to another dtype.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = load_config.weight_mapping or []
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    wanted = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    plain = load_config.hf_quantizer is None  # else integers stay what they are
    converted, cast = [], []
    for name, tensor in tensors.items():
        target, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:  # a name of today that looks like one of yesterday
            target, converter = name, None
        if target not in wanted:
            continue
        if converter is not None:
            converted.append(name)
        elif target in parameters and wanted[target].dtype != tensor.dtype and (plain or tensor.is_floating_point()):
            cast.append(f"{name} is {_short(tensor.dtype)}, not {_short(wanted[target].dtype)}")
    if converted:
        raise UnsupportedModel(
            f"Transformers makes the parameters of {type(model).__name__} out of other tensors than the checkpoint's",
            expected="a parameter for each tensor, whatever it is called",
            found=f"{len(converted)} tensors that it stacks, splits or converts: {_listed(converted)}",
            next_step=ENGINE_MADE,
        )
    if cast:
        raise BindError(
            f"{type(model).__name__} has another dtype than the weights",
            expected="a parameter of the same dtype for each tensor",
            found=_listed(cast),
            next_step=f"give the daemon --dtype {_short(load_config.dtype)} and the weight cache the same dtype here, "
            "or ask Transformers for the dtype that the weights have; if another thread loads too, let them take turns"
            if plain
            else ENGINE_MADE,
        )


def give_buffers_memory(model: Any, storages: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Buffers that lie in the weights' memory (``storages``: addresses) are copied: modules write to theirs.

    Each copy with what it was copied from.
    """
    mapped = frozenset(storages)
    own: dict[int, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or _address(buffer) not in mapped:
                continue
            if id(buffer) not in own:
                own[id(buffer)] = buffer.clone()
                own[id(buffer)]._is_hf_initialized = True  # type: ignore[attr-defined]  # else it would be made anew
                copies.append((own[id(buffer)], buffer))
            module._buffers[name] = own[id(buffer)]
    return copies


def require_mapped(model: Any, storages: Iterable[int], *, without: Iterable[str]) -> None:
    """Raises BindError naming parameters that do not lie in ``storages`` though the weights have them (all but those in
    ``without``), and where the weights have none of the module's.
    """
    mapped, missing = frozenset(storages), frozenset(without)
    loaded = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    copied = [name for name, one in loaded.items() if _address(one) not in mapped and name not in missing]
    if copied:
        raise BindError(
            f"{len(copied)} parameters of {type(model).__name__} are copies",
            expected="every parameter that the weights have in their memory",
            found=_listed(copied),
            next_step=ENGINE_MADE,
        )
    if not loaded.keys() - missing:
        raise BindError(
            f"the weights have none of the parameters of {type(model).__name__}",
            expected="the class that config.json names, or one that shares its body",
            found=f"{len(missing)} parameters that would be newly initialised: {_listed(sorted(missing))}",
            next_step="load it with the class that belongs to the checkpoint",
        )


def require_complete(model: Any, lacking: set[str]) -> None:
    """Raises BindError naming parameters in ``lacking`` that no other is tied to: of a state that was made whole none
    is missing, unless the module is quantized otherwise than the one that it was made of.
    """
    names = sorted(lacking - model.all_tied_weights_keys.keys())
    if names:
        raise BindError(
            f"{type(model).__name__} is quantized otherwise here than where its state was made",
            expected="every parameter of the module in the weights",
            found=f"{len(names)} that are not there: {_listed(names)}",
            next_step="leave quantization_config out, as the daemon does",
        )


def refused(what: str, value: object) -> InvalidOption:
    """The error for an argument, or a kind of checkpoint, that cannot be honoured."""
    return InvalidOption(
        f"{what} cannot be had together with the weight cache",
        expected="the tensors that config.json and the index name, as they are, where the daemon has them",
        found=value,
        next_step="leave it out, or load without the weight cache",
    )


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The addresses of the memory that the tensors are views of: as many as there are segments."""
    return frozenset(_address(tensor) for tensor in tensors)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f", and {more} more" if more > 0 else "")
