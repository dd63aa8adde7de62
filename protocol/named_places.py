"""Which places a command is about: those of the ranks that it names, started or not, or all that have a socket."""

from __future__ import annotations

import argparse
from pathlib import Path

from weightcached.protocol.command_line import whole_number
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.places import DEFAULT_NAME, Place, places_in
from weightcached.protocol.ranks import KINDS, device_of, every_rank


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """A size and a rank of each kind; none of them has a default."""
    group = parser.add_argument_group("ranks")
    for kind, called in KINDS.items():
        group.add_argument(f"--{kind}-size", type=whole_number(1), metavar="N", help=f"of this model's {called} ranks")
        group.add_argument(f"--{kind}-rank", type=whole_number(0), metavar="R", help=f"this {called} rank only")


def named_places(given: argparse.Namespace, runtime_dir: Path) -> list[Place] | None:
    """The places of the ranks that were named, all of them where no rank was; ``None`` where there was no size either.

    Raises InvalidOption for a rank without its size, or one that there is not.
    """
    stated = {kind: getattr(given, f"{kind}_size") for kind in KINDS}
    chosen = {kind: rank for kind in KINDS if (rank := getattr(given, f"{kind}_rank")) is not None}
    for kind in chosen:
        if stated[kind] is None:
            raise InvalidOption(f"--{kind}-rank needs --{kind}-size beside it: both are part of a place")
    if all(size is None for size in stated.values()):
        return None
    ranks = [
        rank
        for rank in every_rank({kind: size or 1 for kind, size in stated.items()})
        if all(getattr(rank, f"{kind}_rank") == wanted for kind, wanted in chosen.items())
    ]
    if not ranks:
        raise InvalidOption(
            "there is no such rank", found=", ".join(f"--{kind}-rank {n}" for kind, n in chosen.items())
        )
    return [Place(runtime_dir, given.name or DEFAULT_NAME, device_of(rank)) for rank in ranks]


def places_with_socket(runtime_dir: Path, name: str | None) -> list[Place]:
    """Those of a directory where weights are served, or kept: of one name, or of every name."""
    return [
        place
        for place in places_in(runtime_dir)
        if (name is None or place.name == name) and place.socket_path.is_socket()
    ]
