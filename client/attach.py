"""The public function: weights for an engine, from the daemon at a place or, where the contract allows it, from disk.

Owns the options of an attach and the order of its steps; each step is a module of its own. The contract is the table of
the design's section 9: disk only when the place is absent, an error for everything else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from weightcached.client import policy, provenance
from weightcached.client.connect import reach
from weightcached.client.evidence import Evidence, gather, prove
from weightcached.client.exchange import ConnectionLost, Progress, Request, negotiate
from weightcached.client.lease import Lease
from weightcached.client.transfer import import_grant
from weightcached.client.weights import WeightSet
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig, Provenance, abbreviated, build_config
from weightcached.protocol.content import weights_visible
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.digest_cache import HEX
from weightcached.protocol.errors import CheckpointMismatch, CheckpointUnproven, InvalidOption, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.hub import resolve
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Grant
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import DEFAULT_NAME, Place, host_device, runtime_directory, sockets_near

logger = logging.getLogger("weightcached.client")

Mode = Literal["off", "client", "require"]
_LONGEST_TIMEOUT_S = 365 * 24 * 3600.0


@dataclass(frozen=True)
class _Content:
    """Which weights are wanted, and what may help to prove it."""

    model_dir: Path
    config: CacheConfig
    want: str
    digest: str | None
    cache_dir: Path | None
    also_trusted: frozenset[str]

    def evidence(self) -> Evidence:
        if self.want != "checkpoint":
            return Evidence()
        return gather(self.model_dir, digest=self.digest, also_trusted=self.also_trusted)


def attach(
    model: str | os.PathLike[str],
    *,
    mode: Mode = "client",
    layout: str = "hf",
    tp_size: int = 1,
    tp_rank: int | None = None,
    dtype: str = "auto",
    quantization: str = "none",
    name: str = DEFAULT_NAME,
    runtime_dir: str | os.PathLike[str] | None = None,
    want: str = "checkpoint",
    digest: str | None = None,
    timeout_s: float = 600.0,
    wait_for_daemon_s: float = 0.0,
    cache_dir: str | os.PathLike[str] | None = None,
    allow_uids: Iterable[int] = (),
    allow_gids: Iterable[int] = (),
    trusted_filesystems: Iterable[str] = (),
    engine_name: str | None = None,
    progress: Progress | None = None,
) -> WeightSet:
    """The weights of ``model`` (a directory, or a hub id), mapped from the daemon at a place. Blocks up to
    ``timeout_s``.

    ``mode``: ``client`` loads from disk when the place is absent, and only then; ``require`` raises DaemonAbsent
    instead; ``off`` always loads from disk. ``layout``, ``tp_size``, ``tp_rank``, ``dtype`` and ``quantization`` must
    be the daemon's. ``want`` is ``checkpoint`` (exactly the content of ``model``), ``current`` (whatever the daemon
    has committed), or a version. ``digest`` states the content's digest and stands instead of files that cannot be
    seen.

    An absent socket is waited for up to ``wait_for_daemon_s``. ``cache_dir`` is where digests are remembered.
    ``allow_uids`` and ``allow_gids`` are trusted beside root and ourselves, ``trusted_filesystems`` beside the known
    ones. ``progress`` is called with every report on a load, by one thread at a time.

    Raises the errors of ``weightcached.protocol.errors``; no descriptor, mapping or thread is left then.
    """
    if mode not in get_args(Mode):
        raise InvalidOption("unknown mode", expected=" or ".join(get_args(Mode)), found=mode)
    rank = _checked_rank(tp_rank, tp_size)
    place = Place(runtime_directory(runtime_dir), name, host_device(tp_size=tp_size, tp_rank=rank))
    timeout_s = _checked_seconds("timeout_s", timeout_s)
    wait_for_daemon_s = _checked_seconds("wait_for_daemon_s", wait_for_daemon_s)
    model_dir = resolve(model)
    wanted = _Content(
        model_dir,
        build_config(model_dir, layout=layout, tp_size=tp_size, tp_rank=rank, dtype=dtype, quantization=quantization),
        want,
        _checked_digest(digest, want),
        None if cache_dir is None else Path(cache_dir),
        frozenset(map(checked_name, trusted_filesystems)),
    )
    if mode == "off":
        return _from_disk(wanted, progress)
    weights = _from_daemon(
        wanted,
        place,
        allowed=AllowList(frozenset(allow_uids), frozenset(allow_gids)),
        engine_name=_engine_name(engine_name),
        deadline=Deadline.after(timeout_s),
        appear_by=Deadline.after(wait_for_daemon_s),
        progress=progress,
    )
    if weights is not None:
        return weights
    return _where_absent(wanted, place, mode, progress)


def _from_daemon(
    wanted: _Content,
    place: Place,
    *,
    allowed: AllowList,
    engine_name: str,
    deadline: Deadline,
    appear_by: Deadline,
    progress: Progress | None,
) -> WeightSet | None:
    """Weights from the place's daemon; None where the place is absent. One that dies while it loads is waited for."""
    where = str(place.socket_path)
    entries = abbreviated(wanted.config.entries())
    request = Request(wanted.config, entries, wanted.want, engine_name, os.getpid(), _client_version(), where)
    mine, evidence = provenance.ours(wanted.model_dir), wanted.evidence()

    def proven(evidence: Evidence) -> Evidence:
        also_trusted = wanted.also_trusted
        return prove(
            wanted.model_dir, evidence, cache_dir=wanted.cache_dir, also_trusted=also_trusted, deadline=deadline
        )

    lost: ConnectionLost | None = None
    while True:
        connection = reach(place, allowed=allowed, deadline=deadline, appear_by=appear_by, lost=lost)
        if connection is None:
            return None
        channel = Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        try:
            if wanted.want == "checkpoint" and evidence.empty:
                raise _nothing_to_prove_with(wanted.model_dir)
            grant, fds = negotiate(channel, request, evidence, prove=proven, deadline=deadline, progress=progress)
            return _granted(channel, grant, fds, wanted, mine, where)
        except ConnectionLost as error:
            channel.close()
            lost = lost or error  # the first: a daemon that is dying takes connections that it will never answer
            if not lost.answered:
                raise
            if lost is error:
                logger.warning("%s; waiting for the next one", error)
        except BaseException:
            channel.close()
            raise


def _granted(
    channel: Channel, grant: Grant, fds: OwnedFds, wanted: _Content, mine: Provenance | None, where: str
) -> WeightSet:
    """The weight set of a grant; it owns ``channel``. Raises when the grant lies, and then leaves nothing mapped."""
    mapped = import_grant(grant, fds, fingerprint=wanted.config.fingerprint, where=where)
    try:
        _require_wanted(grant, wanted, where)
        provenance.compare(mine, grant.provenance, where=where)
        lease = Lease(channel, generation=grant.generation, nonce=grant.nonce, where=where)
    except BaseException:
        mapped.close()
        raise
    return WeightSet(
        mapped.manifest,
        mapped.segments,
        source="daemon",
        version=grant.version,
        receipts_version=grant.receipts_version,
        lease=lease,
    )


def _require_wanted(grant: Grant, wanted: _Content, where: str) -> None:
    """The daemon compares content; this catches one that grants what it itself says is something else."""
    if wanted.digest is not None and grant.digest != wanted.digest:
        raise TransferError(
            "the daemon granted other content than was asked for",
            expected=f"digest {wanted.digest}",
            found=f"digest {grant.digest}",
            where=where,
        )
    if wanted.want not in ("checkpoint", "current", grant.version, grant.receipts_version):
        raise TransferError(
            "the daemon granted another version than was asked for",
            expected=wanted.want,
            found=f"{grant.version} ({grant.receipts_version})",
            where=where,
        )


def _where_absent(wanted: _Content, place: Place, mode: Mode, progress: Progress | None) -> WeightSet:
    near = sockets_near(place)
    if mode == "require":
        raise policy.absent(place.socket_path, near, instead="use mode 'client' to load from disk then")
    if not weights_visible(wanted.model_dir):
        raise policy.absent(place.socket_path, near, instead=f"mount the weights at {wanted.model_dir} to load them")
    from weightcached.client.counters import count_fallback

    count_fallback(str(place))
    logger.warning("%s: loading the weights of %s from disk", policy.absence(place.socket_path, near), wanted.model_dir)
    return _from_disk(wanted, progress)


def _from_disk(wanted: _Content, progress: Progress | None) -> WeightSet:
    from weightcached.client.fallback import load_from_disk

    weights = load_from_disk(
        wanted.model_dir,
        wanted.config,
        digest=wanted.digest,
        cache_dir=wanted.cache_dir,
        also_trusted=wanted.also_trusted,
        progress=progress,
    )
    if wanted.want not in ("checkpoint", "current", weights.version, weights.receipts_version):
        found = f"{weights.version} ({weights.receipts_version})"
        weights.close()
        raise CheckpointMismatch(
            "the checkpoint on disk is not the version that was asked for",
            expected=wanted.want,
            found=found,
            where=wanted.model_dir,
        )
    return weights


def _nothing_to_prove_with(model_dir: Path) -> CheckpointUnproven:
    return CheckpointUnproven(
        "nothing here says which content is wanted: the directory shows no weights, and no digest was stated",
        expected="weight files, a sidecar, or a digest",
        found="config.json only",
        where=model_dir,
        next_step="pass digest=… (`weightcached digest DIR` prints it where the weights are), or mount the sidecar too",
    )


def _checked_rank(tp_rank: int | None, tp_size: int) -> int:
    """A rank is never defaulted where there are several: two engines would both get shard 0, with all shapes right."""
    if tp_rank is not None:
        return tp_rank
    if tp_size != 1:
        raise InvalidOption(
            "tp_rank is missing", expected=f"0 to {tp_size - 1}", found="none", next_step="pass this process's rank"
        )
    return 0


def _checked_digest(digest: str | None, want: str) -> str | None:
    if digest is None:
        return None
    if want != "checkpoint":
        raise InvalidOption("a digest belongs to want='checkpoint'", found=f"want={want!r} and a digest")
    if not HEX.fullmatch(digest):
        raise InvalidOption("unusable digest", expected="64 hex digits, as `weightcached digest` prints", found=digest)
    return digest


def _checked_seconds(what: str, seconds: float) -> float:
    if math.isnan(seconds) or seconds < 0:
        raise InvalidOption(f"unusable {what}", expected="seconds, 0 or more", found=seconds)
    return min(seconds, _LONGEST_TIMEOUT_S)


def _engine_name(stated: str | None) -> str:
    return (stated or Path(sys.argv[0] if sys.argv else "").name or "python")[:200]


@functools.cache
def _client_version() -> str:
    return importlib.metadata.version("weightcached")
