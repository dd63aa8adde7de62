"""Which online quantization is asked for: its method with every parameter, and how a command line spells it.

Pure. What a method makes of a weight, and which weights it refuses, is the loader's (`loader/quantizers.py`,
`loader/arithmetic.py`). What a checkpoint itself is quantized with is part of the model's config.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, SerializerFunctionWrapHandler, model_serializer

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.frozen import Frozen
from weightcached.protocol.text import shown

SPELLINGS = "none, fp8, fp8-tensor, fp8-block[=OUTxIN], int8, int4[=GROUP], int4-asym[=GROUP]"
BLOCK = (128, 128)
GROUP = 128
GROUP_MULTIPLE = 8
"""So many four-bit values make the int32 they are packed into: no group is cut by one."""
SIZE_MAX = 65536
"""Of a block's side, or of a group."""
_ADDED = frozenset({"block", "group", "symmetric"})


class Quantization(Frozen):
    """How this project quantizes while loading. A parameter that the method does not have is null."""

    method: Literal["none", "fp8", "int8", "int4"] = "none"
    """``fp8`` is e4m3."""
    granularity: Literal["tensor", "channel", "block", "group"] | None = None
    """What has a scale of its own: a weight matrix, an output channel, a block of one, a group of inputs of a
    channel."""
    block: Annotated[tuple[int, int], PlainSerializer(list)] | None = None
    """Outputs and inputs of a block."""
    group: int | None = None
    """Inputs of a group."""
    symmetric: bool | None = None
    """Of integers: whether zero is zero, or each group has a zero point."""

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Parameters that came after the first release are left out where the method does not have them: what an
        earlier release has made keeps its fingerprint, and is adopted.
        """
        return {name: value for name, value in dump(self).items() if value is not None or name not in _ADDED}

    @classmethod
    def named(cls, name: str) -> Quantization:
        """The method, with all its parameters, that one of `SPELLINGS` stands for. Raises InvalidOption."""
        method, given, value = name.partition("=")
        match method:
            case "none" if not given:
                return cls()
            case "fp8" if not given:
                return cls(method="fp8", granularity="channel")
            case "fp8-tensor" if not given:
                return cls(method="fp8", granularity="tensor")
            case "fp8-block":
                return cls(method="fp8", granularity="block", block=_block(value) if given else BLOCK)
            case "int8" if not given:
                return cls(method="int8", granularity="channel", symmetric=True)
            case "int4" | "int4-asym":
                group = _group(value) if given else GROUP
                return cls(method="int4", granularity="group", group=group, symmetric=method == "int4")
        raise InvalidOption("unknown quantization", expected=SPELLINGS, found=shown(name))

    @property
    def spelled(self) -> str:
        """What ``named`` takes for it, its parameters spelled out."""
        match self:
            case Quantization(granularity="block", block=(outputs, inputs)):
                return f"{self.method}-block={outputs}x{inputs}"
            case Quantization(granularity="group"):
                return f"{self.method}{'' if self.symmetric else '-asym'}={self.group}"
            case Quantization(granularity="tensor"):
                return f"{self.method}-tensor"
        return self.method


def _block(text: str) -> tuple[int, int]:
    sides = re.fullmatch("([0-9]{1,5})x([0-9]{1,5})", text)
    outputs, inputs = map(int, sides.groups()) if sides else (0, 0)
    if not (0 < outputs <= SIZE_MAX and 0 < inputs <= SIZE_MAX):
        raise InvalidOption(
            "the block of fp8-block cannot be used",
            expected=f"OUTxIN, each of 1 to {SIZE_MAX}, as in fp8-block={BLOCK[0]}x{BLOCK[1]}",
            found=shown(text),
        )
    return outputs, inputs


def _group(text: str) -> int:
    group = int(text) if re.fullmatch("[0-9]{1,5}", text) else 0
    if not (0 < group <= SIZE_MAX and group % GROUP_MULTIPLE == 0):
        raise InvalidOption(
            "the group of int4 cannot be used",
            expected=f"a multiple of {GROUP_MULTIPLE}, at most {SIZE_MAX}, as in int4={GROUP}",
            found=shown(text),
        )
    return group
