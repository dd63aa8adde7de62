"""The options that say which shard of a model is meant: the same words on every command that takes them.

Owns the options, what they are as keywords of ``build_config`` and of the client's ``attach``, and which ranks are
meant where the rank may be left out. What a command does with the shards is its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from weightcached.protocol.config import LAYOUT_REVISIONS
from weightcached.protocol.errors import InvalidOption

Arguments = argparse._ActionsContainer


def add_shard_arguments(arguments: Arguments) -> None:
    """Everything but the model and the rank."""
    arguments.add_argument(
        "--tp-size", type=positive, default=1, metavar="N", help="tensor-parallel ranks (default: 1)"
    )
    arguments.add_argument("--layout", choices=tuple(LAYOUT_REVISIONS), default="hf", help="default: hf")
    arguments.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="default: as on disk"
    )
    arguments.add_argument("--quantization", choices=("none", "fp8"), default="none", help="default: none")


def add_rank_argument(arguments: Arguments) -> None:
    """``--tp-rank`` where all ranks are meant without it."""
    arguments.add_argument("--tp-rank", type=int, metavar="R", help="only this rank (default: all)")


def shards_of(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The shards that are meant, one for each rank, as keywords of ``build_config`` and ``attach``. Raises
    InvalidOption.
    """
    if given.tp_rank is not None and not 0 <= given.tp_rank < given.tp_size:
        raise InvalidOption("there is no such rank", expected=f"0 to {given.tp_size - 1}", found=given.tp_rank)
    ranks = range(given.tp_size) if given.tp_rank is None else (given.tp_rank,)
    common = {"layout": given.layout, "dtype": given.dtype, "quantization": given.quantization}
    return [{**common, "tp_size": given.tp_size, "tp_rank": rank} for rank in ranks]


def positive(text: str) -> int:
    """A number from 1 on. Raises ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1 is expected")
    return value
