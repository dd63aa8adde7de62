"""The options that say which shard of a model is meant: the same words on every command that takes them.

Owns the options, what they are as keywords of ``build_config`` and of the client's ``attach``, and which ranks are
meant where ranks may be left out. What a command does with the shards is its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from weightcached.protocol.command_line import quantization, whole_number
from weightcached.protocol.config import LAYOUT_REVISIONS
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.quantization import SPELLINGS
from weightcached.protocol.ranks import KINDS, every_rank, ranks_of

Arguments = argparse._ActionsContainer


def add_shard_arguments(arguments: Arguments) -> None:
    """Everything but the model and the ranks."""
    for kind, called in KINDS.items():
        arguments.add_argument(
            f"--{kind}-size", type=whole_number(1), default=1, metavar="N", help=f"{called} ranks (default: 1)"
        )
    arguments.add_argument(
        "--expert-placement",
        choices=("linear", "round_robin"),
        default="linear",
        help="of experts on expert-parallel ranks (default: linear)",
    )
    arguments.add_argument("--layout", choices=tuple(LAYOUT_REVISIONS), default="hf", help="default: hf")
    arguments.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="default: as on disk"
    )
    arguments.add_argument(
        "--quantization",
        type=quantization,
        default="none",
        metavar="METHOD",
        help=f"of linear layers, while loading: {SPELLINGS} (default: none)",
    )


def add_rank_filters(arguments: Arguments) -> None:
    """``--tp-rank`` and the others where all ranks are meant without them."""
    for kind, called in KINDS.items():
        arguments.add_argument(
            f"--{kind}-rank", type=whole_number(0), metavar="R", help=f"this {called} rank only (default: all)"
        )


def sizes(given: argparse.Namespace) -> dict[str, int]:
    """How many ranks there are of each kind."""
    return {kind: getattr(given, f"{kind}_size") for kind in KINDS}


def shards_of(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The shards that are meant, one for each rank, as keywords. Raises InvalidOption when there is none."""
    chosen = {f"{kind}_rank": rank for kind in KINDS if (rank := getattr(given, f"{kind}_rank")) is not None}
    common = {"layout": given.layout, "dtype": given.dtype, "quantization": given.quantization}
    common |= {f"{kind}_size": size for kind, size in sizes(given).items()}
    common["expert_placement"] = given.expert_placement
    ranks = [ranks_of(one) for one in every_rank(sizes(given), placement=given.expert_placement)]
    shards = [common | rank for rank in ranks if chosen.items() <= rank.items()]
    if not shards:
        named = ", ".join(f"--{name.replace('_', '-')} {rank}" for name, rank in chosen.items())
        raise InvalidOption("there is no such rank", found=named)
    return shards
