"""Two modules compared: what is in them, which of their names are one tensor, and where their parameters lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.support.resources import own_memfd_mappings

PADDED_BY_TRANSFORMERS = {"cls.predictions.bias", "cls.predictions.decoder.bias"}
"""Transformers pads the bias of tied words to their number, by nothing, and into memory of its own."""


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers under all their names, those that no checkpoint has too."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def require_same(module: torch.nn.Module, wanted: torch.nn.Module) -> None:
    """The same names, with the same bytes in the same form, tied in the same way, with the same flags."""
    state, reference = state_of(module), state_of(wanted)
    assert list(state) == list(reference)
    assert type(module) is type(wanted)
    for name, tensor in state.items():
        other = reference[name]
        assert type(tensor) is type(other), name
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (other.dtype, other.shape, other.requires_grad), (
            name
        )
        assert bytes_of(tensor) == bytes_of(other), name
        flags = [getattr(one, "_is_hf_initialized", None) for one in (tensor, other)]
        assert flags[0] == flags[1], f"{name}: {flags}"
    assert _ties(state) == _ties(reference)
    assert [type(one).__name__ for one in module.modules()] == [type(one).__name__ for one in wanted.modules()]
    assert not any(one.training for one in module.modules())


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def unmapped(module: torch.nn.Module) -> set[str]:
    """Names of parameters that do not lie in a memfd, or on a page that this process has written to."""
    mappings = own_memfd_mappings()
    return {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not any(
            mapping.start <= parameter.data_ptr() and parameter.data_ptr() + parameter.nbytes <= mapping.end
            for mapping in mappings
            if mapping.own_nbytes == 0
        )
    }


def mapped_buffers(module: torch.nn.Module) -> set[str]:
    """Names of buffers that lie in a memfd: there should be none, because modules write to theirs."""
    mappings = own_memfd_mappings()
    return {
        name
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if any(mapping.start <= buffer.data_ptr() < mapping.end for mapping in mappings)
    }


def _ties(state: dict[str, torch.Tensor]) -> set[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(names) for names in groups.values() if len(names) > 1}


def same_outputs(module: torch.nn.Module, wanted: torch.nn.Module, token_ids: Iterable[int]) -> bool:
    """Whether both make exactly the same of a sequence."""
    ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        first, second = (one(ids, return_dict=True)[0] for one in (module, wanted))
    return torch.equal(first, second)
