"""What ``weightcached serve`` may be told. Owns the options, their validation and their help; runs nothing.

:class:`ServeOptions` is frozen and complete: whoever has one has a place whose path fits and values that can be used.
``up`` uses the same arguments without the rank. Numbers carry their unit in the name; all are seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from weightcached.daemon.address import Address
from weightcached.protocol.command_line import Parser, positive_seconds, seconds, whole_number
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.memory.chosen import Memory, device_named
from weightcached.protocol.peers import AllowList
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments, allow_list
from weightcached.protocol.places import DEFAULT_NAME, Place, runtime_directory
from weightcached.protocol.ranks import KINDS, device_of, rank_of
from weightcached.protocol.shard_options import (
    add_device_arguments,
    add_engine_argument,
    add_shard_arguments,
    parse_with_engine,
    sizes,
)
from weightcached.protocol.worker_messages import LoadStrategy


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One daemon's options, valid."""

    model: str
    """A directory, or a hub id."""
    parallel: Parallel
    layout: str
    """Ours, or the engine's name."""
    engine: str | None
    engine_arguments: tuple[str, ...]
    dtype: str
    quantization: str
    memory: Memory | None
    """None: the device's own kind, which the driver says once the place is bound."""
    device: str
    place: Place
    allowed: AllowList
    cache_dir: Path | None
    snapshot: Path | None
    load_strategy: LoadStrategy
    trusted_filesystems: tuple[str, ...]
    drain_timeout_s: float
    exchange_timeout_s: float
    connections_max: int
    connections_per_uid_max: int
    leases_per_uid_max: int
    in_flight_max_mib: int
    """Of frames that are half received or half sent, for all clients together; half of it for one user."""
    verify_on_adopt: bool
    keep_generations: int
    """Besides the one that is served, for rollback."""
    adoption_grace_s: float
    metrics_address: Address | None
    log_format: str
    log_level: str
    parent_pid: int | None


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What to load, and how; everything but the rank."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", required=True, metavar="DIR|ID", help="a checkpoint directory, or a hub id")
    add_shard_arguments(group)
    add_engine_argument(group)
    add_device_arguments(group)
    group.add_argument(
        "--snapshot",
        metavar="DIR",
        help="load what `weightcached snapshot save` wrote there; of the model only config.json has to be there",
    )
    group.add_argument(
        "--load-strategy",
        choices=get_args(LoadStrategy),
        default="auto",
        help="how files are read: through the page cache (read), the same for files far away (prefetch), past it\n"
        "(direct), past the host into a GPU's memory (gds: GPUDirect Storage, by way of kvikio), or from a mapping\n"
        "(mmap); the log says what auto has chosen, and why (default: auto)",
    )
    group.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where content digests are remembered (default: as `weightcached digest --help` says)",
    )
    group.add_argument(
        "--trust-filesystem",
        metavar="TYPE",
        action="append",
        default=[],
        help="believe inode and ctime there too (repeatable)",
    )


def add_running_arguments(parser: argparse.ArgumentParser) -> None:
    """Limits and logs of a daemon. At its limits, used by hostile clients, a keeper still fits into 64 MiB."""
    group = parser.add_argument_group("running")
    group.add_argument(
        "--drain-timeout",
        type=positive_seconds,
        default=10.0,
        metavar="S",
        help="for exchanges under way at SIGTERM (default: 10)",
    )
    group.add_argument(
        "--exchange-timeout",
        type=positive_seconds,
        default=10.0,
        metavar="S",
        help="for one request, and for one reply (default: 10)",
    )
    group.add_argument("--connections-max", type=whole_number(1), default=2048, metavar="N", help="default: 2048")
    group.add_argument(
        "--connections-per-uid-max", type=whole_number(1), default=512, metavar="N", help="for one user (default: 512)"
    )
    group.add_argument(
        "--leases-per-uid-max", type=whole_number(1), default=500, metavar="N", help="for one user (default: 500)"
    )
    group.add_argument(
        "--in-flight-max",
        type=whole_number(1),
        default=8,
        metavar="MIB",
        help="frames half received or half sent, in all; half of it for one user (default: 8)",
    )
    group.add_argument(
        "--verify-on-adopt",
        action="store_true",
        help="hash resident weights before serving them again after a restart",
    )
    group.add_argument(
        "--keep-generations",
        type=whole_number(0),
        default=1,
        metavar="N",
        help="weights besides those that are served that are kept for rollback while they fit (default: 1)",
    )
    group.add_argument(
        "--adoption-grace",
        type=seconds,
        default=60.0,
        metavar="S",
        help="after a restart earlier weights are kept at least so long, for engines to resume (default: 60)",
    )
    group.add_argument(
        "--metrics-address",
        metavar="IP:PORT",
        help="serve /metrics, /healthz, /readyz and /status.json there (default: nowhere)",
    )
    group.add_argument(
        "--metrics-allow-remote", action="store_true", help="let that address be one that other hosts can reach"
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )


def parse_serve(argv: list[str]) -> ServeOptions:
    """The options of ``weightcached serve``. Exits with usage on bad syntax; raises InvalidOption or InvalidPlace, and
    DeviceAbsent for a GPU that is not seen. A GPU's driver is asked here for its UUID, unless that is given whole.
    """
    parser = Parser(
        prog="weightcached serve",
        description="Load one rank's weights and serve them to engines of this host until SIGTERM.",
        epilog="exit codes: 0 stopped by a signal; 1 could not start (place taken, directory not trusted, …),\n"
        "or lost the memory it served (cuda-ipc); 64 bad options; 70 a bug. A load that fails does not end the\n"
        "daemon: it answers with the reason.",
    )
    add_model_arguments(parser)
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}-rank", type=int, metavar="R", help=f"this daemon's rank; required when --{kind}-size is over 1"
        )
    parser.add_argument("--parent-pid", type=whole_number(1), help=argparse.SUPPRESS)  # `up`: die with that process
    add_place_arguments(parser, name=NAME_OF_ONE)
    add_running_arguments(parser)
    return serve_options(parse_with_engine(parser, argv))


def serve_options(given: argparse.Namespace) -> ServeOptions:
    """Validate parsed arguments. Raises InvalidOption or InvalidPlace, and DeviceAbsent for a GPU that is not seen."""
    if not given.model:
        raise InvalidOption("--model is empty", expected="a checkpoint directory, or a hub id", found="no text")
    ranks = {kind: getattr(given, f"{kind}_rank") for kind in KINDS}
    parallel = rank_of(sizes(given), ranks, placement=given.expert_placement, spelling="--{}-{}")
    device = device_named(given.device, given.memory)
    return ServeOptions(
        model=given.model,
        parallel=parallel,
        layout=given.layout,
        engine=given.engine,
        engine_arguments=given.engine_arguments,
        dtype=given.dtype,
        quantization=given.quantization,
        memory=given.memory,
        device=device,
        place=Place(
            runtime_directory(given.runtime_dir),
            given.name or DEFAULT_NAME,
            device_of(parallel, device),
        ),
        allowed=allow_list(given),
        cache_dir=Path(given.cache_dir) if given.cache_dir is not None else None,
        snapshot=Path(given.snapshot).absolute() if given.snapshot is not None else None,
        load_strategy=given.load_strategy,
        trusted_filesystems=tuple(map(checked_name, given.trust_filesystem)),
        drain_timeout_s=given.drain_timeout,
        exchange_timeout_s=given.exchange_timeout,
        connections_max=given.connections_max,
        connections_per_uid_max=given.connections_per_uid_max,
        leases_per_uid_max=given.leases_per_uid_max,
        in_flight_max_mib=given.in_flight_max,
        verify_on_adopt=given.verify_on_adopt,
        keep_generations=given.keep_generations,
        adoption_grace_s=given.adoption_grace,
        metrics_address=metrics_address(given),
        log_format=given.log_format,
        log_level=given.log_level,
        parent_pid=given.parent_pid,
    )


def metrics_address(given: argparse.Namespace) -> Address | None:
    """Where to serve metrics; ``None`` for nowhere. Raises InvalidOption."""
    if given.metrics_address is None:
        return None
    return Address.parse(
        given.metrics_address,
        option="--metrics-address",
        remote_option="--metrics-allow-remote",
        allow_remote=given.metrics_allow_remote,
    )
