"""``weightcached snapshot save|load``: a rank's finished shard on disk, so that a cold boot reads only what it keeps.

``save`` attaches like an engine (to the daemon, or to the disk where there is none) and writes what it gets; ``load``
loads a snapshot as ``serve --snapshot`` would, into memory of its own on the same device, checks every digest, says how
long that took, and lets go of it. Owns both commands' options, order and exit codes: 0 done · 1 it could not be done:
no weights, another configuration or content, a snapshot that is not whole, a disk that is full · 64 bad options. With
``--json`` an error is one line too, ``{"error": {"code": …, "message": …, …}}``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from weightcached.client.attach import Mode, attach
from weightcached.client.weights import WeightSet
from weightcached.protocol.command_line import USAGE_EXIT, Parser, seconds
from weightcached.protocol.config import CacheConfig, build_config
from weightcached.protocol.content import version_of
from weightcached.protocol.digest_cache import DigestCache, cache_directory
from weightcached.protocol.digests import digest_of
from weightcached.protocol.errors import DaemonAbsent, InvalidOption, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.hub import resolve
from weightcached.protocol.manifest import Manifest, encode_manifest
from weightcached.protocol.memory.chosen import HOST, Chosen
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments, allow_list
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.ranks import device_of
from weightcached.protocol.shard_options import (
    add_device_arguments,
    add_engine_argument,
    add_rank_filters,
    add_shard_arguments,
    home_of,
    parse_with_engine,
    shard_with_key,
    shards_of,
)
from weightcached.protocol.snapshot import open_snapshot, write_snapshot
from weightcached.protocol.text import binary_size, one_line

_FAILED_EXIT = 1
_EXIT_CODES = """\
exit codes: 0 done; 1 it could not be done: no weights, another configuration or content, a snapshot that is not whole,
a disk that is full; 64 bad options"""


def main(argv: list[str]) -> int:
    """Run one of both; the exit code."""
    given = parse_with_engine(_parser(), argv)
    work = _save if given.command == "save" else _load
    try:
        shards, model_dir = shards_of(given), resolve(given.model)
        wanted = [_Wanted.of(given, shard, model_dir) for shard in shards]
        done = [work(given, one) for one in wanted]
    except WeightCacheError as error:
        if given.json:
            print(json.dumps({"error": error.as_fields()}))
        else:
            print(f"weightcached snapshot {given.command}: {error}", file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else _FAILED_EXIT
    if given.json:
        print(json.dumps({"snapshots": done}))
    else:
        print("\n".join(one_line(_described(one)) for one in done))
    return 0


def _described(done: dict[str, Any]) -> str:
    rate = f"{binary_size(done['nbytes'])} in {done['seconds']:.2f} s"
    return f"{done['path']}: {done['parameters']} parameters, {rate}, {done['what']}, content digest {done['digest']}"


@dataclass(frozen=True)
class _Wanted:
    """One rank's shard: as keywords of ``attach``, and as a config in the memory it is attached or loaded in."""

    model_dir: Path
    shard: dict[str, Any]
    home: Chosen
    config: CacheConfig

    @classmethod
    def of(cls, given: argparse.Namespace, shard: dict[str, Any], model_dir: Path) -> _Wanted:
        home = home_of(given, shard)
        shard = shard_with_key(given, shard, model_dir, device=home.device)
        config = build_config(model_dir, **shard, memory=home.memory, device=home.device)
        return cls(model_dir, shard, home, config)


def _save(given: argparse.Namespace, wanted: _Wanted) -> dict[str, Any]:
    trusted = tuple(map(checked_name, given.trust_filesystem))
    digest = (
        given.digest
        or digest_of(wanted.model_dir, DigestCache(cache_directory(given.cache_dir)), also_trusted=trusted).hex
    )
    with _attached(given, wanted, digest=digest, trusted=trusted) as weights:
        weights.verify()
        started_s = time.monotonic()
        manifest = _of_any_memory(weights.manifest, wanted.config, digest)
        folder = write_snapshot(
            Path(given.directory), device_of(wanted.config.parallel), manifest=manifest, segments=weights.readable()
        )
        seconds, what = time.monotonic() - started_s, f"from the {weights.source}"
        return _done(folder, weights.manifest, seconds, what, digest)


def _attached(given: argparse.Namespace, wanted: _Wanted, *, digest: str, trusted: tuple[str, ...]) -> WeightSet:
    allowed = allow_list(given)
    try:
        return attach(
            wanted.model_dir,
            **wanted.shard,
            device=wanted.home.option,
            memory=wanted.home.memory,
            mode=given.mode,
            name=given.name or DEFAULT_NAME,
            runtime_dir=given.runtime_dir,
            digest=digest,
            timeout_s=given.timeout,
            cache_dir=given.cache_dir,
            allow_uids=allowed.uids,
            allow_gids=allowed.gids,
            trusted_filesystems=trusted,
            engine_name="weightcached snapshot",
        )
    except DaemonAbsent as error:
        if wanted.config.engine is None:
            raise
        rank = wanted.config.parallel.tp_rank
        error.next_step = f"start the daemon of rank {rank}, or save the ranks that are served, each with --tp-rank"
        raise


def _of_any_memory(manifest: Manifest, config: CacheConfig, digest: str) -> bytes:
    """The manifest with the content's digest, which may not have been known when the weights were loaded, and as of
    host memory: a snapshot is of bytes, and names no GPU.
    """
    config = config.model_copy(update={"memory": HOST.memory, "device": HOST.device})
    version = version_of(config.rankless_fingerprint, digest=digest, receipts=None)
    update = {"digest": digest, "version": version, "fingerprint": config.fingerprint, "config": config.model_dump()}
    return encode_manifest(manifest.meta.model_copy(update=update), list(manifest), manifest.accounting)


def _load(given: argparse.Namespace, wanted: _Wanted) -> dict[str, Any]:
    from weightcached.loader.filling import to_be_filled
    from weightcached.loader.snapshot import placement_of, restore

    kind = kind_of(wanted.config)
    with open_snapshot(Path(given.directory), device_of(wanted.config.parallel)) as snapshot:
        snapshot.require_config(wanted.config)
        placement = placement_of(snapshot)
        kind.admit(sum(map(kind.resident_nbytes, placement.segments_nbytes)))
        with OwnedFds() as memory:
            for nbytes in placement.segments_nbytes:
                memory.append(kind.allocate(nbytes, name="weightcached:snapshot"))
            with to_be_filled(list(memory), kind, nbytes=placement.segments_nbytes) as target:
                restored = restore(snapshot, placement, target)
        return _done(snapshot.folder, snapshot.manifest, restored.seconds["load"], "all digests right", snapshot.digest)


def _done(folder: Path, manifest: Manifest, seconds: float, what: str, digest: str) -> dict[str, Any]:
    return {
        "path": str(folder),
        "parameters": len(manifest),
        "nbytes": sum(manifest.meta.segments_nbytes),
        "seconds": round(seconds, 6),
        "what": what,
        "digest": digest,
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached snapshot",
        description="Save a rank's finished shard to disk, and try to load it. `weightcached serve --snapshot DIR`\n"
        "loads it for good: it reads only what it keeps, in order, and needs no more of the model than config.json.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="save|load")
    save = commands.add_parser(
        "save",
        help="write the shards that daemons serve",
        description="Write the shards that daemons serve (without a daemon: loaded from disk) as a snapshot.",
        epilog=_EXIT_CODES,
    )
    load = commands.add_parser(
        "load",
        help="try a snapshot",
        description="Load a snapshot into memory, check every digest, say how long it took, and let go of it.",
        epilog=_EXIT_CODES,
    )
    for one in (save, load):
        one.add_argument("model", metavar="MODEL", help="a checkpoint directory (config.json suffices), or a hub id")
        one.add_argument("directory", metavar="DIR", help="the snapshot's directory, with a folder for each rank")
        add_shard_arguments(one)
        add_device_arguments(one)
        add_engine_argument(one)
        add_rank_filters(one)
        one.add_argument("--json", action="store_true", help="one JSON document")
    save.add_argument(
        "--mode",
        choices=get_args(Mode),
        default="client",
        help="client: from the daemon, from disk where there is none; require: from the daemon; off: from disk",
    )
    save.add_argument(
        "--digest",
        metavar="HEX",
        help="the content's digest, where the weights are not to be seen here: the first word that "
        "`weightcached digest` prints",
    )
    save.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="for each attach (default: 600)")
    save.add_argument("--cache-dir", metavar="DIR", help="where content digests are remembered")
    save.add_argument(
        "--trust-filesystem", metavar="TYPE", action="append", default=[], help="believe inode and ctime there too"
    )
    add_place_arguments(save, name=NAME_OF_ONE)
    return parser
