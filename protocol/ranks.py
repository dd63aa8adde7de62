"""How a rank is stated: sizes and ranks of a command line or of an attach become one checked `Parallel`.

Owns the kinds of parallelism that tell daemons of one model apart, the rule that no rank is guessed, and the list of
all ranks of a model. Pure. Both sides use it, so that both look at the same place for the same rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.memory.chosen import CPU
from weightcached.protocol.places import RANKS_MAX, host_device

KINDS: Mapping[str, str] = {"tp": "tensor-parallel", "pp": "pipeline", "ep": "expert-parallel"}
"""Kind → what it is called."""


def rank_of(
    sizes: Mapping[str, int], ranks: Mapping[str, int | None], *, placement: str = "linear", spelling: str = "{}_{}"
) -> Parallel:
    """The rank with these ``sizes`` and ``ranks``, by kind. Raises InvalidOption, spelling options as the caller does.

    A rank is never defaulted where there are several: two engines would both get shard 0, with all shapes right.
    """
    for name, number in [*sizes.items(), *ranks.items()]:
        # 0.0 or False would name a place where no daemon can ever be, and an absent place is loaded from disk.
        if number is not None and type(number) is not int:
            found = f"{number!r} for {name}"
            raise InvalidOption("sizes and ranks are whole numbers", expected="ints", found=found)
    for kind, size in sizes.items():
        if not 1 <= size <= RANKS_MAX:
            raise InvalidOption(f"unusable {spelling.format(kind, 'size')}", expected=f"1 to {RANKS_MAX}", found=size)
        if ranks.get(kind) is None and size > 1:
            raise InvalidOption(
                f"{spelling.format(kind, 'rank')} is required when {spelling.format(kind, 'size')} is over 1: "
                "a rank that is guessed loads the wrong shard",
                expected=f"0 to {size - 1}",
                next_step="pass this process's rank",
            )
    stated = {f"{kind}_size": size for kind, size in sizes.items()}
    stated |= {f"{kind}_rank": ranks.get(kind) or 0 for kind in sizes}
    try:
        parallel = Parallel.model_validate({**stated, "expert_placement": placement})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidOption("unusable ranks", expected=first["msg"], found=str(stated)) from error
    if parallel.ep_size > 1 and (
        parallel.ep_size % parallel.tp_size or parallel.ep_rank % parallel.tp_size != parallel.tp_rank
    ):
        raise InvalidOption(
            "the expert-parallel and the tensor-parallel rank are not of one device",
            expected="an ep size that is a multiple of the tp size, an ep rank that is the tp rank modulo the tp size",
            found=f"ep rank {parallel.ep_rank} of {parallel.ep_size}, tp rank {parallel.tp_rank} of {parallel.tp_size}",
        )
    return parallel


def every_rank(sizes: Mapping[str, int], *, placement: str = "linear") -> list[Parallel]:
    """All ranks of a model: stage by stage, and in each the tensor-parallel ones or, if there are more, the expert
    ranks. Raises InvalidOption for sizes that do not go together.
    """
    width = max(sizes["tp"], sizes["ep"])
    return [
        rank_of(
            sizes,
            {"pp": stage, "tp": position % sizes["tp"], "ep": position if sizes["ep"] > 1 else 0},
            placement=placement,
        )
        for stage in range(sizes["pp"])
        for position in range(width)
    ]


def ranks_of(parallel: Parallel) -> dict[str, int]:
    """``tp_rank`` and the others, as options and as `rank_of` name them."""
    return {f"{kind}_rank": getattr(parallel, f"{kind}_rank") for kind in KINDS}


def rank_word(parallel: Parallel) -> str:
    """What the rank is called in reports: ``tp0of2``, ``tp0of2-pp1of3-ep0of4``."""
    return device_of(parallel).removeprefix("host-")


def device_of(parallel: Parallel, device: str = CPU) -> str:
    """The device word of the rank's place: on a GPU its identity, whatever the rank; in host memory the rank."""
    if device != CPU:
        return device
    return host_device(
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
        pp_size=parallel.pp_size,
        pp_rank=parallel.pp_rank,
        ep_size=parallel.ep_size,
        ep_rank=parallel.ep_rank,
    )
