"""The public function: weights for an engine, from the daemon at a place or, where the contract allows it, from disk.

Owns the options of an attach and the order of its steps; each step is a module of its own. The contract is the table of
the design's section 9: disk only when the place is absent, an error for everything else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from weightcached.client import holder, options, policy, provenance
from weightcached.client.backoff import Backoff
from weightcached.client.connect import reach
from weightcached.client.evidence import Evidence, NotProvenInTime
from weightcached.client.exchange import ConnectionLost, NeverAnswered, Progress, Request, negotiate
from weightcached.client.holder import OnHolderLost
from weightcached.client.lease import Lease
from weightcached.client.rejoin import Rejoin
from weightcached.client.stale import OnStale, checked_policy
from weightcached.client.transfer import import_grant
from weightcached.client.wanted import Wanted
from weightcached.client.weights import WeightSet
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import CacheConfig, Provenance, abbreviated, build_config
from weightcached.protocol.content import weights_visible
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.errors import CheckpointMismatch, InvalidOption
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.hub import resolve
from weightcached.protocol.memory.chosen import CPU, chosen
from weightcached.protocol.memory.giving_up import give_up
from weightcached.protocol.messages import CLIENT_TO_DAEMON, DAEMON_TO_CLIENT, Grant
from weightcached.protocol.peers import AllowList
from weightcached.protocol.places import DEFAULT_NAME, Place, runtime_directory, sockets_near
from weightcached.protocol.ranks import device_of, rank_of

logger = logging.getLogger("weightcached.client")

Mode = Literal["off", "client", "require"]


@dataclass(frozen=True)
class _Terms:
    """Where the lease is to be had, whom to trust there, of which config, and how it is held."""

    place: Place
    allowed: AllowList
    config: CacheConfig
    engine_name: str
    heartbeat_s: float
    on_stale: OnStale
    on_holder_lost: OnHolderLost

    @property
    def where(self) -> str:
        return str(self.place.socket_path)

    def lease(self, channel: Channel, grant: Grant) -> Lease:
        """The lease on ``channel``, where ``grant`` has just arrived; it owns the channel."""
        rejoin = Rejoin(
            place=self.place,
            allowed=self.allowed,
            generation=grant.generation,
            manifest_sha256=grant.manifest_sha256,
            config=self.config,
            engine_name=self.engine_name,
            client_version=options.client_version(),
        )
        return Lease(channel, rejoin, nonce=grant.nonce, heartbeat_s=self.heartbeat_s, on_stale=self.on_stale)


def attach(
    model: str | os.PathLike[str],
    *,
    mode: Mode = "client",
    layout: str = "hf",
    tp_size: int = 1,
    tp_rank: int | None = None,
    pp_size: int = 1,
    pp_rank: int | None = None,
    ep_size: int = 1,
    ep_rank: int | None = None,
    expert_placement: str = "linear",
    dtype: str = "auto",
    quantization: str = "none",
    engine: EngineKey | None = None,
    device: str = CPU,
    memory: str | None = None,
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
    heartbeat_s: float = 5.0,
    on_stale: OnStale = "keep",
    on_holder_lost: OnHolderLost = "exit",
) -> WeightSet:
    """The weights of ``model`` (a directory, or a hub id), mapped from the daemon at a place. Blocks up to
    ``timeout_s``.

    ``mode``: ``client`` loads from disk when the place is absent, and only then; ``require`` raises DaemonAbsent
    instead; ``off`` always loads from disk. ``layout``, sizes and ranks of the parallel kinds (tensor, pipeline,
    expert), ``expert_placement`` (``linear`` or ``round_robin``), ``dtype`` and ``quantization`` must be the daemon's.
    An expert rank is a device of a pipeline stage: ``ep_rank`` modulo ``tp_size`` is ``tp_rank``. A layout that an
    engine made has the engine's name, and ``engine`` is the key that its adapter computes (``engine_key``); such
    weights come from a daemon or not at all: where it is absent DaemonAbsent is raised in every mode, and the engine
    loads them by itself.

    ``device``: ``cpu``, or the GPU that holds the weights and computes with them: ``cuda`` (the only one that this
    process sees), ``cuda:INDEX`` or ``cuda:UUID`` (or the beginning of one). It is looked for by its UUID, which both
    sides see whatever their CUDA_VISIBLE_DEVICES. ``memory`` is the daemon's memory kind, by default the device's own.

    ``want`` is ``checkpoint`` (exactly the content of ``model``), ``current`` (whatever the daemon has committed), or a
    version. ``digest`` states the content's digest and stands instead of files that cannot be seen.

    An absent socket is waited for up to ``wait_for_daemon_s``. ``cache_dir`` is where digests are remembered.
    ``allow_uids`` and ``allow_gids`` are trusted beside root and ourselves, ``trusted_filesystems`` beside the known
    ones. ``progress`` is called with every report on a load, by one thread at a time.

    A daemon that dies later takes nothing away; the lease is resumed when another one serves the same weights
    (:class:`Lease`). One that is silent for ``heartbeat_s`` is asked, and given up after as long again, so that one
    that hangs is noticed within twice as long. ``on_stale`` says what to do when the place serves other weights from
    then on: ``keep`` what is mapped, ``exit`` the process with status 75, or a function to be called with the reason
    and the daemon's report (or None). Who keeps going can still stage and swap in what is served then.

    Memory of kind ``cuda-ipc`` is gone with the daemon, or with the process that holds it for the daemon: then this
    process is ended with status 69. ``on_holder_lost`` is a function to be called first, with the reason, if there is
    something to be done yet; it has a second for that.

    Raises the errors of ``weightcached.protocol.errors``; no descriptor, mapping or thread is left then.
    """
    if mode not in get_args(Mode):
        raise InvalidOption("unknown mode", expected=" or ".join(get_args(Mode)), found=mode)
    parallel = rank_of(
        {"tp": tp_size, "pp": pp_size, "ep": ep_size},
        {"tp": tp_rank, "pp": pp_rank, "ep": ep_rank},
        placement=expert_placement,
    )
    home = chosen(device, memory)
    logger.debug("memory kind %s on %s: %s", home.memory, home.device, home.reason)
    place = Place(runtime_directory(runtime_dir), name, device_of(parallel, home.device))
    timeout_s = options.checked_seconds("timeout_s", timeout_s)
    wait_for_daemon_s = options.checked_seconds("wait_for_daemon_s", wait_for_daemon_s)
    model_dir = resolve(model)
    wanted = Wanted(
        model_dir,
        build_config(
            model_dir,
            layout=layout,
            dtype=dtype,
            quantization=quantization,
            engine=engine,
            memory=home.memory,
            device=home.device,
            **parallel.model_dump(),
        ),
        options.checked_want(want),
        options.checked_digest(digest, want),
        None if cache_dir is None else Path(cache_dir),
        frozenset(map(checked_name, trusted_filesystems)),
    )
    terms = _Terms(
        place,
        AllowList(frozenset(allow_uids), frozenset(allow_gids)),
        wanted.config,
        options.engine_name(engine_name),
        options.checked_heartbeat(heartbeat_s),
        checked_policy(on_stale),
        holder.checked_policy(on_holder_lost),
    )
    if mode == "off" and engine is not None:
        raise InvalidOption("an engine's layout is not loaded from disk", expected="client or require", found=mode)
    deadline, appear_by = Deadline.after(timeout_s), Deadline.after(wait_for_daemon_s)
    return _attached(wanted, terms, mode, deadline=deadline, appear_by=appear_by, progress=progress)


def _attached(
    wanted: Wanted, terms: _Terms, mode: Mode, *, deadline: Deadline, appear_by: Deadline, progress: Progress | None
) -> WeightSet:
    """The contract: from disk where the place is absent, and only then (or where no daemon is to be asked)."""
    if mode == "off":
        return _from_disk(wanted, progress)
    weights = _from_daemon(wanted, terms, deadline=deadline, appear_by=appear_by, progress=progress)
    return weights if weights is not None else _where_absent(wanted, terms.place, mode, progress)


def _from_daemon(
    wanted: Wanted, terms: _Terms, *, deadline: Deadline, appear_by: Deadline, progress: Progress | None
) -> WeightSet | None:
    """Weights from the place's daemon; None where the place is absent.

    Once it has been connected it goes on until the deadline: a daemon that dies then is waited for, because whoever
    keeps the weights (or the listening socket, in whose backlog this may have been) starts another.
    """
    entries = abbreviated(wanted.config.entries())
    version, pid = options.client_version(), os.getpid()
    request = Request(wanted.config, entries, wanted.want, terms.engine_name, pid, version, terms.where)
    mine, evidence = provenance.ours(wanted.model_dir), wanted.evidence()

    def proven(evidence: Evidence) -> Evidence:
        return wanted.proven(evidence, deadline)

    lost: ConnectionLost | None = None
    losses, backoff = 0, Backoff()
    while True:
        connection = reach(terms.place, allowed=terms.allowed, deadline=deadline, appear_by=appear_by, lost=lost)
        if connection is None:
            return None
        channel = Channel(connection, outgoing=CLIENT_TO_DAEMON, incoming=DAEMON_TO_CLIENT)
        try:
            wanted.require_some(evidence)
            grant, fds = negotiate(channel, request, evidence, prove=proven, deadline=deadline, progress=progress)
            return _granted(channel, grant, fds, wanted, mine, terms)
        except ConnectionLost as error:
            channel.close()
            losses += 1
            if lost is None:
                logger.warning("%s; waiting for the next one", error)
            lost = (lost if lost is not None and lost.answered else error).at_last(losses)
        except (NeverAnswered, NotProvenInTime) as error:
            channel.close()
            raise (lost or error) from error
        except BaseException:
            channel.close()
            raise
        time.sleep(min(backoff.next_s(), deadline.remaining_s()))


def _granted(
    channel: Channel, grant: Grant, fds: OwnedFds, wanted: Wanted, mine: Provenance | None, terms: _Terms
) -> WeightSet:
    """The weight set of a grant; it owns ``channel``. Raises when the grant lies, and then leaves nothing mapped."""
    where = terms.where
    mapped = import_grant(grant, fds, config=wanted.config, where=where, on_holder_lost=terms.on_holder_lost)
    lease: Lease | None = None
    try:
        wanted.require_granted(grant, where)
        provenance.compare(mine, grant.provenance, where=where)
        lease = terms.lease(channel, grant)
        return WeightSet(
            mapped.manifest,
            mapped.segments,
            source="daemon",
            version=grant.version,
            receipts_version=grant.receipts_version,
            lease=lease,
        )
    except BaseException:
        if lease is not None:
            lease.close()  # a watcher that nobody can close would have the lease again and again
        give_up(mapped)
        raise


def _where_absent(wanted: Wanted, place: Place, mode: Mode, progress: Progress | None) -> WeightSet:
    near = sockets_near(place)
    if wanted.config.engine is not None:
        raise policy.absent(place.socket_path, near, instead=f"load them with {wanted.config.layout}'s own loader")
    if mode == "require":
        raise policy.absent(place.socket_path, near, instead="use mode 'client' to load from disk then")
    if not weights_visible(wanted.model_dir):
        raise policy.absent(place.socket_path, near, instead=f"mount the weights at {wanted.model_dir} to load them")
    from weightcached.client.counters import count_fallback

    count_fallback(str(place))
    logger.warning("%s: loading the weights of %s from disk", policy.absence(place.socket_path, near), wanted.model_dir)
    return _from_disk(wanted, progress)


def _from_disk(wanted: Wanted, progress: Progress | None) -> WeightSet:
    from weightcached.client.fallback import load_from_disk

    weights = load_from_disk(
        wanted.model_dir,
        wanted.config,
        digest=wanted.digest,
        cache_dir=wanted.cache_dir,
        also_trusted=wanted.also_trusted,
        progress=progress,
    )
    if not wanted.accepts_version(weights.version, weights.receipts_version):
        found = f"{weights.version} ({weights.receipts_version})"
        weights.close()
        raise CheckpointMismatch(
            "the checkpoint on disk is not the version that was asked for",
            expected=wanted.want,
            found=found,
            where=wanted.model_dir,
        )
    return weights
