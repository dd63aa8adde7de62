"""KV-cache scales: one number for the keys and one for the values of a layer, under whatever name a tool gave them.

Pure. Engines hold them as ``<attention>.attn.k_scale`` and ``v_scale`` (and ``q_scale``, ``prob_scale``); each tool
that calibrates them has a spelling of its own. One that a checkpoint does not have is no parameter: the engine keeps
its own initial value.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

from weightcached.loader.architectures.rows import Part, Wanted
from weightcached.loader.boxes import whole
from weightcached.loader.schemes.linear import KvScale
from weightcached.protocol.errors import UnexpectedTensor

_SPELLINGS = tuple(
    (re.compile(rf"(?P<attention>.+?){tail}"), kinds)
    for tail, kinds in (
        (r"\.attn\.(?P<kind>[qkv]|prob)_scale", None),
        (r"\.[qkv]_proj\.(?P<kind>[qkv])_scale", None),
        (r"\.qk(?:qk)?v_proj\.(?P<kind>[kv])_scale", None),
        (r"\.(?P<kind>[kv])_cache\.scale", None),
        (r"\.(?P<kind>q)\.scale", None),
        (r"\.(?P<kind>[qkv])_proj\.output_scale", None),
        (r"\.(?P<kind>prob)_output_scale", None),
        (r"\.(?P<kind>[qkv])_scale", None),
        # Deprecated: one for both. Engines copy it from the keys' to the values', sooner or later.
        (r"\.kv_scale", ("k", "v")),
    )
)

ENDINGS = ("scale", "_zero_point")
"""Of every such name: what has another ending need not be looked at."""

_ZERO_POINT = re.compile(r"(?P<attention>.+?)(?:\.attn)?\.[qkv]_zero_point")


def kv_scales(names: Iterable[str], attentions: Mapping[str, str], held: KvScale) -> list[Wanted]:
    """The scales among ``names`` (of tensors), in order. ``attentions``: the checkpoint's name → the engine's.

    Raises UnexpectedTensor when a scale is there twice, under two spellings.
    """
    found: dict[str, str] = {}
    for name in sorted(names):
        for parameter in _parameters(name, attentions):
            if parameter in found:
                raise UnexpectedTensor(
                    f"two tensors are the scale {parameter}",
                    expected="one of them",
                    found=f"{found[parameter]}, {name}",
                    next_step="see which tool wrote the checkpoint; it must have one spelling of its KV-cache scales",
                )
            found[parameter] = name
    return [_wanted(parameter, found[parameter], held) for parameter in sorted(found)]


def zero_points(names: Iterable[str], attentions: Container[str]) -> dict[str, str]:
    """Excuses for the zero points of KV-cache scales among ``names``."""
    matches = ((name, _ZERO_POINT.fullmatch(name)) for name in names)
    reason = "the KV cache is quantized symmetrically: engines use no zero points"
    return {name: reason for name, match in matches if match is not None and match["attention"] in attentions}


def attention_of(name: str) -> str | None:
    """The attention whose scale, or zero point, the tensor ``name`` can be, if any."""
    matches = (spelling.fullmatch(name) for spelling in (*(spelling for spelling, _ in _SPELLINGS), _ZERO_POINT))
    return next((match["attention"] for match in matches if match is not None), None)


def _parameters(name: str, attentions: Mapping[str, str]) -> list[str]:
    """The parameters that the tensor ``name`` becomes: none, one, or two."""
    for spelling, kinds in _SPELLINGS:
        match = spelling.fullmatch(name)
        if match is not None and match["attention"] in attentions:
            return [f"{attentions[match['attention']]}.attn.{kind}_scale" for kind in kinds or (match["kind"],)]
    return []


def _wanted(parameter: str, source: str, held: KvScale) -> Wanted:
    same_as = ((1,),) if held.shape == () else ((),)
    part = Part(source, held.shape, whole(held.shape), whole(held.shape), same_as=same_as)
    return Wanted(parameter, held.shape, "replicated", (part,), dtype=held.dtype, finite=True)
