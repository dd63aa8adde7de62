"""The options that say which shard of a model is meant: the same words on every command that takes them.

Owns the options, what they are as keywords of ``build_config`` and of the client's ``attach``, and which ranks are
meant where ranks may be left out; for an engine's layout, its name and its own arguments after ``--`` too. What a
command does with the shards is its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from weightcached.protocol.command_line import whole_number
from weightcached.protocol.config import LAYOUT_REVISIONS, Parallel
from weightcached.protocol.engines import EngineRequest, engine_key
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.memory.chosen import CPU, DEVICE_SPELLINGS, Chosen, Memory, chosen
from weightcached.protocol.quantization import SPELLINGS, Quantization
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
        type=_quantization,
        default="none",
        metavar="METHOD",
        help=f"of linear layers, while loading: {SPELLINGS} (default: none)",
    )


def add_device_argument(arguments: Arguments, *, default: str | None = CPU, called: str = CPU) -> None:
    """``--device``: where the weights live. ``called`` is what its help says of the ``default``."""
    arguments.add_argument(
        "--device",
        default=default,
        metavar="DEVICE",
        help=f"where the weights live: {DEVICE_SPELLINGS}; for several ranks cuda means, for rank N, the visible GPU "
        f"with index N (default: {called})",
    )


def add_device_arguments(arguments: Arguments) -> None:
    """Where the shards live, and in which kind of memory."""
    add_device_argument(arguments)
    arguments.add_argument(
        "--memory", choices=get_args(Memory), help="memory kind (default: host on cpu, cuda-vmm on a GPU)"
    )


def device_of_rank(device: str, rank: int, ranks: int) -> str:
    """``cuda`` means, for several ranks, the visible GPU with the rank's number."""
    return f"cuda:{rank}" if device == "cuda" and ranks > 1 else device


def home_of(given: argparse.Namespace, shard: Mapping[str, Any]) -> Chosen:
    """The memory of one of :func:`shards_of`: that of its rank. Raises InvalidOption, and DeviceAbsent for a GPU that
    this process does not see.
    """
    ranks = [ranks_of(one) for one in every_rank(sizes(given), placement=given.expert_placement)]
    number = ranks.index({name: shard[name] for name in ranks[0]})
    return chosen(device_of_rank(given.device, number, len(ranks)), given.memory)


def add_engine_argument(arguments: Arguments) -> None:
    """``--engine``, for parsers that :func:`parse_with_engine` uses."""
    arguments.add_argument(
        "--engine",
        metavar="NAME",
        help="the layout is the engine's own: its installed adapter builds it with the engine's loader, as the\n"
        "engine's arguments say, which stand last, after --",
    )


def parse_with_engine(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse what stands before the first ``--``. What stands after it are ``engine_arguments``, and ``layout`` is the
    engine's name where there is one. Exits with usage where that cannot be meant.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_args(argv[:split])
    given.engine_arguments = tuple(argv[split + 1 :])
    if given.engine is None:
        if given.engine_arguments:
            parser.error("arguments after -- are an engine's: --engine NAME is expected before them")
        return given
    if given.engine in LAYOUT_REVISIONS:
        parser.error(f"{given.engine} is a layout, not an engine: --layout {given.engine} is expected")
    for option, default in (("layout", "hf"), ("quantization", "none")):
        if getattr(given, option) != default:
            parser.error(f"--{option} is not for layouts of engines: {given.engine} decides it, by its own arguments")
    given.layout = given.engine
    return given


def shard_with_key(
    given: argparse.Namespace, shard: Mapping[str, Any], model_dir: Path, *, device: str = CPU
) -> dict[str, Any]:
    """One of :func:`shards_of` with the key of its engine, where it has one. Imports the engine's adapter, and perhaps
    the engine. ``device`` is a config's (:attr:`Chosen.device`). Raises what ``engine_key`` raises.
    """
    if given.engine is None:
        return dict(shard)
    ranks = {name: shard[name] for name in Parallel.model_fields if name in shard}
    request = EngineRequest(
        model_dir=model_dir,
        parallel=Parallel(**ranks),
        dtype=given.dtype,
        device=device,
        arguments=given.engine_arguments,
    )
    return {**shard, "engine": engine_key(given.engine, request)}


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


def _quantization(text: str) -> str:
    """One of the spellings that `Quantization.named` takes, as it is. Raises ArgumentTypeError."""
    try:
        Quantization.named(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
