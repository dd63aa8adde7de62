"""The dtypes weights can have: our name (torch's), safetensors' code, bytes an element. Pure; no torch.

Everything that counts bytes of tensors asks here: the checkpoint reader, plans, the manifest, the client's views.
Dtypes whose elements are smaller than a byte cannot be placed by byte ranges and are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightcached.protocol.errors import UnknownDtype
from weightcached.protocol.text import shown


@dataclass(frozen=True, slots=True)
class Dtype:
    """One row: ``name`` as torch spells it, ``code`` as safetensors spells it, ``itemsize_bytes``, kinds of use."""

    name: str
    code: str
    itemsize_bytes: int
    castable: bool = False
    """May be the source or the target of a dtype conversion (ordinary floating point; never 8-bit or integer data)."""


_ROWS = (
    Dtype("bool", "BOOL", 1),
    Dtype("uint8", "U8", 1),
    Dtype("int8", "I8", 1),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", 1),
    Dtype("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    Dtype("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    Dtype("int16", "I16", 2),
    Dtype("uint16", "U16", 2),
    Dtype("float16", "F16", 2, castable=True),
    Dtype("bfloat16", "BF16", 2, castable=True),
    Dtype("int32", "I32", 4),
    Dtype("uint32", "U32", 4),
    Dtype("float32", "F32", 4, castable=True),
    Dtype("int64", "I64", 8),
    Dtype("uint64", "U64", 8),
    Dtype("float64", "F64", 8, castable=True),
    Dtype("complex64", "C64", 8),
)

DTYPES: dict[str, Dtype] = {row.name: row for row in _ROWS}
"""Our name → row."""

DTYPES_BY_CODE: dict[str, Dtype] = {row.code: row for row in _ROWS}
"""safetensors' code → row."""

SUB_BYTE_CODES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Codes safetensors defines whose elements share bytes: known, and refused."""


def dtype_of_code(code: str, *, where: str) -> Dtype:
    """The row for a safetensors code. Raises UnknownDtype, naming ``where`` it stood."""
    row = DTYPES_BY_CODE.get(code)
    if row is not None:
        return row
    if code in SUB_BYTE_CODES:
        raise UnknownDtype(
            f"dtype {code} has elements smaller than a byte, which this release cannot place",
            where=where,
            next_step="use a checkpoint that stores these values packed in U8",
        )
    raise UnknownDtype(
        f"dtype {shown(code)} is not one safetensors defines", expected=", ".join(sorted(DTYPES_BY_CODE)), where=where
    )


def itemsize_bytes(name: str) -> int:
    """Bytes of one element of the dtype called ``name`` (ours). Raises UnknownDtype."""
    row = DTYPES.get(name)
    if row is None:
        raise UnknownDtype(f"dtype {name!r} is not one this release knows", expected=", ".join(sorted(DTYPES)))
    return row.itemsize_bytes
