"""Which places a command is about: those of the ranks that it names, started or not, or all that have a socket."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from weightcached.protocol.command_line import whole_number
from weightcached.protocol.errors import DaemonAbsent, InvalidOption
from weightcached.protocol.memory.chosen import CPU, device_named
from weightcached.protocol.places import DEFAULT_NAME, Place, places_in
from weightcached.protocol.ranks import KINDS, device_of, every_rank
from weightcached.protocol.shard_options import add_device_argument, device_of_rank


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """A size and a rank of each kind, and the device: none of them has a default."""
    group = parser.add_argument_group("ranks")
    for kind, called in KINDS.items():
        group.add_argument(f"--{kind}-size", type=whole_number(1), metavar="N", help=f"of this model's {called} ranks")
        group.add_argument(f"--{kind}-rank", type=whole_number(0), metavar="R", help=f"this {called} rank only")
    add_device_argument(group, default=None, called=f"{CPU} where a size is named, else any")


def named_places(given: argparse.Namespace, runtime_dir: Path) -> list[Place] | None:
    """The places of the ranks that were named, all of them where no rank was; ``None`` where there was neither a size
    nor a device. Without a driver a GPU can be named by its whole UUID.

    Raises InvalidOption for a rank without its size, one that there is not, and two ranks at one place; DeviceAbsent
    and DeviceFailed where a GPU has to be looked up, and is not seen.
    """
    stated = {kind: getattr(given, f"{kind}_size") for kind in KINDS}
    only = {kind: rank for kind in KINDS if (rank := getattr(given, f"{kind}_rank")) is not None}
    for kind in only:
        if stated[kind] is None:
            raise InvalidOption(f"--{kind}-rank needs --{kind}-size beside it: both are part of a place")
    if given.device is None and all(size is None for size in stated.values()):
        return None
    every = every_rank({kind: size or 1 for kind, size in stated.items()})
    named = {
        number: rank
        for number, rank in enumerate(every)
        if all(getattr(rank, f"{kind}_rank") == wanted for kind, wanted in only.items())
    }
    if not named:
        raise InvalidOption("there is no such rank", found=", ".join(f"--{kind}-rank {n}" for kind, n in only.items()))
    places = {}
    for number, rank in named.items():
        device = device_named(device_of_rank(given.device or CPU, number, len(every)))
        places[number] = Place(runtime_dir, given.name or DEFAULT_NAME, device_of(rank, device))
    require_apart(places)
    return list(places.values())


def require_apart(places: Mapping[int, Place]) -> None:
    """Raises InvalidOption for two ranks, by their numbers, that would be at one place."""
    first_at: dict[Place, int] = {}
    for rank, place in places.items():
        if (other := first_at.setdefault(place, rank)) != rank:
            raise InvalidOption(
                f"ranks {other} and {rank} would be at one place",
                expected="a GPU for each rank",
                found=place,
                next_step="say --device cuda: rank N then has the GPU with index N",
            )


def nobody_there(runtime_dir: Path, name: str | None) -> DaemonAbsent:
    """The error where no place of this name, or of any, has a socket."""
    others = sorted({place.name for place in places_with_socket(runtime_dir, None)})
    return DaemonAbsent(
        "no daemon serves under this name" if name is not None else "no daemon serves in this runtime directory",
        expected=name,
        found=", ".join(others) or "none",
        where=runtime_dir / name if name is not None else runtime_dir,
        next_step="name another with --runtime-dir and --name, or start the daemons",
    )


def places_with_socket(runtime_dir: Path, name: str | None) -> list[Place]:
    """Those of a directory where weights are served, or kept: of one name, or of every name."""
    return [
        place
        for place in places_in(runtime_dir)
        if (name is None or place.name == name) and place.socket_path.is_socket()
    ]
