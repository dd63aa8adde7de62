"""Owns one thing: what a safetensors index file (``model.safetensors.index.json``) may say. Pure; reads no file.

Only :mod:`weightcached.protocol.content` calls it, with bytes whose number it has already limited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from weightcached.protocol.errors import IndexFileError, PickleRefused
from weightcached.protocol.text import shown

INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 256 << 20
"""About two million tensors. A larger file is not an index."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NAME_LIMIT_BYTES = 255  # NAME_MAX: a longer one could not be a file's


class _Unacceptable(ValueError):
    """JSON that parses, but that two readers could understand differently."""


def parse_index(raw: bytes, *, where: str) -> Mapping[str, str]:
    """The read-only ``weight_map`` (tensor name → plain file name), not empty.

    ``where`` names the index in errors. Raises :class:`IndexFileError` for anything else than one JSON object with such
    a map (repeated keys, NaN, names that leave the directory), :class:`PickleRefused` when it names pickle files.
    """
    document = _parse_json(raw, where)
    if not isinstance(document, dict):
        raise _bad("the index is not a JSON object", expected="an object with weight_map", found=document, where=where)
    if "weight_map" not in document:
        raise _bad("the index has no weight_map", expected="weight_map", found=sorted(document)[:8], where=where)
    weight_map = document["weight_map"]
    if not isinstance(weight_map, dict):
        raise _bad("weight_map is not an object", expected="tensor → file name", found=weight_map, where=where)
    if not weight_map:
        raise _bad("weight_map is empty", expected="at least one tensor", found=weight_map, where=where)
    for tensor, name in weight_map.items():
        if not _is_encodable(tensor):
            raise _bad("weight_map has a tensor name that is not text", expected="UTF-8", found=tensor, where=where)
        _check_file_name(tensor, name, where)
    return MappingProxyType(weight_map)


def _parse_json(raw: bytes, where: str) -> object:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, numbers beyond Python's limit, and ours
        reason = str(error)
    raise IndexFileError(
        "the index is not acceptable JSON", expected="one JSON object in UTF-8", found=reason, where=where
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Unacceptable(f"key {shown(repeated)} stands twice")
    return found


def _no_constant(constant: str) -> object:
    raise _Unacceptable(f"{constant} is not JSON")


def _check_file_name(tensor: str, name: object, where: str) -> None:
    if not isinstance(name, str):
        raise _bad(f"weight_map[{shown(tensor)}] is not text", expected="a file name", found=name, where=where)
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name and _is_encodable(name)
    if not plain or len(name.encode("utf-8")) > _NAME_LIMIT_BYTES:
        raise _bad(
            f"weight_map[{shown(tensor)}] is not a plain file name",
            expected="a file inside the checkpoint's directory",
            found=name,
            where=where,
        )
    if name.endswith(PICKLE_SUFFIXES):
        raise PickleRefused(
            f"weight_map[{shown(tensor)}] is a pickle file, which can run code and is never opened",
            expected="*.safetensors",
            found=shown(name),
            where=where,
            next_step="convert the checkpoint to safetensors, where it is trusted",
        )
    if not name.endswith(".safetensors"):
        raise _bad(
            f"weight_map[{shown(tensor)}] is no safetensors file", expected="*.safetensors", found=name, where=where
        )


def _is_encodable(text: str) -> bool:
    """JSON can spell lone surrogates, which no UTF-8 file or tensor name holds and which fail when encoded later."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _bad(message: str, *, expected: str, found: object, where: str) -> IndexFileError:
    return IndexFileError(message, expected=expected, found=shown(found), where=where)
