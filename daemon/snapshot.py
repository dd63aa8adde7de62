"""The one function that puts the keeper's record into a ``Report``: status, and whatever else shows state, come from
here.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from pathlib import Path

from weightcached.daemon.rank_state import generation_infos
from weightcached.daemon.record import Record
from weightcached.daemon.vault import Keeping
from weightcached.protocol.messages import Report, shortened

DAEMON_VERSION = version("weightcached")
_SHORT_MAX_CHARACTERS = 1024


def report(record: Record) -> Report:
    """Everything there is to show, at this moment."""
    options = record.options
    published, custody = record.published, record.custody
    generation = published.generation if published is not None else None
    loaded = published.generation if published is not None and not published.adopted else None
    keeping = custody.keeping(generation.id if generation is not None else None) if custody else Keeping("none")
    progress = record.progress.current
    return Report(
        daemon_version=DAEMON_VERSION,
        pid=os.getpid(),
        place=str(options.place),
        socket_path=str(options.place.socket_path),
        model=shortened(generation.came_from if generation is not None else options.model)[:_SHORT_MAX_CHARACTERS],
        layout=options.layout,
        tp_rank=options.parallel.tp_rank,
        tp_size=options.parallel.tp_size,
        dtype=options.dtype,
        quantization=options.quantization,
        memory=record.memory or "unknown",
        state=record.state.value,
        stage=progress.stage,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        bytes_per_s=progress.bytes_per_s,
        resident_nbytes=generation.resident_nbytes if generation is not None else 0,
        own_memory_nbytes=own_memory_nbytes(),
        generation=generation.id if generation is not None else None,
        version=generation.version if generation is not None else None,
        fingerprint=record.config.fingerprint if record.config is not None else None,
        digest=generation.digest if generation is not None else None,
        leases=record.leases.infos(),
        lease_count=len(record.leases),
        last_error=shortened(f"{record.last_error.code}: {record.last_error}") if record.last_error else None,
        uptime_s=time.monotonic() - record.started_s,
        load_seconds=loaded.seconds if loaded is not None else {},
        bytes_read=loaded.bytes_read if loaded is not None else 0,
        bytes_kept=generation.bytes_kept if generation is not None else 0,
        accounting=generation.accounting if generation is not None else None,
        attaches=dict(record.attaches),
        vault=keeping.state,
        vault_reason=shortened(keeping.reason) if keeping.reason is not None else None,
        proven=published is not None and published.unproven is None,
        unproven_reason=shortened(published.unproven) if published is not None and published.unproven else None,
        generations=len(record.generations) + (len(custody.candidates) + len(custody.quarantined) if custody else 0),
        held=generation_infos(record),
        quarantined=tuple(custody.quarantined) if custody is not None else (),
        quarantined_nbytes=sum(one.nbytes for one in custody.quarantined.values()) if custody is not None else 0,
        starts=custody.record.starts if custody is not None else 0,
        adoptions=custody.record.adoptions if custody is not None else 0,
        adoption_seconds=record.adoption_seconds,
        heartbeat_age_s=record.leases.silence_s(),
        disk_fallbacks=record.fallbacks.total,
        connections=record.limits.connections.used,
        detached=record.leases.detached(),
        protocol_errors=dict(record.protocol_errors),
        adoption_refusals=dict(record.adoption_refusals),
        adoption_attempts=custody.record.adoption_attempts if custody is not None else 0,
        unexplained_nbytes=_unexplained_nbytes(record),
        attach_durations=record.attach_durations.message(),
        load_durations=record.load_durations.message(),
        load_rates=record.progress.rates,
    )


def _unexplained_nbytes(record: Record) -> int:
    """Bytes of generations that are held here and are neither served nor leased."""
    custody = record.custody
    if custody is None:
        return 0
    held = {id_: parts.nbytes for id_, parts in custody.candidates.items()}
    held |= {id_: one.nbytes for id_, one in custody.quarantined.items()}
    leased = record.leases.generations()
    return sum(nbytes for id_, nbytes in held.items() if id_ not in leased)


def own_memory_nbytes(status: Path = Path("/proc/self/status")) -> int:
    """Anonymous resident memory of this process: what it costs itself, without shared libraries and without
    segments.
    """
    for line in status.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
