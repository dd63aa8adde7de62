"""Can what a vault handed back be served? The checks, each with its reason; no checkpoint and no weight is read.

Owns judging one generation: is it whole (manifest, segments, sizes, seals, digest of the manifest), and is it of the
configuration that was asked for. Changes nothing: what becomes of a refused generation is decided by ``acquiring.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from weightcached.daemon.generation import CheckpointReceipts, Evidence, Generation, Origin, sha256_of
from weightcached.daemon.holdings import Parts
from weightcached.daemon.options import ServeOptions
from weightcached.daemon.patience import in_thread
from weightcached.daemon.state_record import GenerationRecord
from weightcached.protocol.config import (
    LAYOUT_REVISIONS,
    CacheConfig,
    Provenance,
    explain_differences,
)
from weightcached.protocol.errors import ConfigurationError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.manifest import MANIFEST_MAX_BYTES, Manifest, ManifestMeta
from weightcached.protocol.memory import host
from weightcached.protocol.memory.chosen import Memory
from weightcached.protocol.memory.kinds import kind_of
from weightcached.protocol.messages import AccountingCounts
from weightcached.protocol.quantization import Quantization

_FIELDS_SHOWN = 8
_UNKNOWN_RECEIPTS = CheckpointReceipts.unknown("the record of the files' receipts was lost")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A generation that came back complete. Its descriptors are still the holdings'."""

    id: str
    parts: Parts
    meta: ManifestMeta
    config: CacheConfig
    record: GenerationRecord | None
    manifest_nbytes: int
    manifest_sha256: str

    @property
    def receipts(self) -> CheckpointReceipts:
        """Of the files it was loaded from, as far as they are known."""
        if self.record is None:
            return _UNKNOWN_RECEIPTS
        receipts = self.record.receipts
        return CheckpointReceipts(receipts.sha256, trusted=receipts.trusted, rule=receipts.rule)

    @property
    def digest(self) -> str | None:
        return (self.record.digest if self.record is not None else None) or self.meta.digest

    def evidence(self, path: str) -> Evidence:
        return Evidence(self.digest, self.receipts, path)

    def generation(self, take: Callable[[int], int], *, provenance: Provenance, origin: Origin) -> Generation:
        """As it was published. ``take`` hands descriptors over; provenance and origin stand in where none was recorded.

        Without a record nothing is known about the files it was loaded from but what the manifest says: a digest or
        nothing.
        """
        record, meta, parts = self.record, self.meta, self.parts
        if parts.manifest is None:
            raise ValueError("a generation without a manifest is not whole")
        taken = map(kind_of(self.config).resident_nbytes, meta.segments_nbytes)
        memory = OwnedFds([take(parts.manifest), *(take(parts.segments[number]) for number in sorted(parts.segments))])
        return Generation(
            id=self.id,
            config=self.config,
            memory=memory,
            manifest_nbytes=self.manifest_nbytes,
            manifest_sha256=self.manifest_sha256,
            segments_nbytes=meta.segments_nbytes,
            resident_nbytes=record.resident_nbytes if record is not None else sum(taken),
            bytes_read=meta.bytes_read,
            bytes_kept=meta.bytes_kept,
            accounting=record.accounting if record is not None else _NOT_COUNTED,
            receipts=self.receipts,
            receipts_version=meta.receipts_version,
            digest=self.digest,
            provenance=record.provenance if record is not None else provenance,
            origin=Origin(record.model_dir, record.hub_id) if record is not None else origin,
            seconds=meta.seconds,
            engine_inputs=record.engine_inputs if record is not None else None,
            under_model=record.under_model if record is not None else None,
            pushed_by=record.pushed_by if record is not None else None,
        )


_NOT_COUNTED = AccountingCounts(expected=0, loaded=0, ignored=0, unexpected=0)


async def examine(generation_id: str, parts: Parts, record: GenerationRecord | None) -> Whole:
    """Check that the generation is whole and says of itself what was recorded. Raises TransferError with the reason.

    Costs a hash of the manifest and no look at a segment's bytes.
    """
    if parts.problem is not None:
        raise _torn(parts.problem)
    if parts.manifest is None:
        raise _torn(f"{len(parts.segments)} segments came without the manifest, which is stored last")
    nbytes = os.fstat(parts.manifest).st_size
    if nbytes > MANIFEST_MAX_BYTES:
        raise _torn("the manifest is too large", expected=MANIFEST_MAX_BYTES, found=nbytes)
    host.verify(parts.manifest, nbytes=nbytes, what="the manifest")
    sha256 = await sha256_of(parts.manifest, nbytes=nbytes)
    if record is not None and (sha256, nbytes) != (record.manifest_sha256, record.manifest_nbytes):
        raise _torn("the manifest is not the one that was published", expected=record.manifest_sha256, found=sha256)
    meta = _meta(parts.manifest)
    if meta.generation != generation_id:
        raise _torn("the manifest is another generation's", expected=generation_id, found=meta.generation)
    if sorted(parts.segments) != list(range(len(meta.segments_nbytes))):
        raise _torn("not all segments came", expected=len(meta.segments_nbytes), found=sorted(parts.segments))
    config = _config(meta)
    if kind_of(config).dies_with_holder:
        raise _torn("its memory died with the daemon that loaded it", found=f"memory of kind {config.memory}")
    for number, size in enumerate(meta.segments_nbytes):
        verify = partial(kind_of(config).verify, parts.segments[number], nbytes=size, what=f"segment {number}")
        await in_thread(verify)
    return Whole(
        id=generation_id,
        parts=parts,
        meta=meta,
        config=config,
        record=record,
        manifest_nbytes=nbytes,
        manifest_sha256=sha256,
    )


def _torn(message: str, *, expected: object = None, found: object = None) -> TransferError:
    return TransferError(f"what the vault handed back is not whole: {message}", expected=expected, found=found)


def _meta(manifest_fd: int) -> ManifestMeta:
    fd = host.export(manifest_fd)  # with a file position of its own
    with open(fd, "rb", buffering=0) as file:
        return Manifest.decode_meta(file)


def _config(meta: ManifestMeta) -> CacheConfig:
    try:
        config = CacheConfig.model_validate(meta.config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(
            "the kept weights' configuration is not one that this release knows",
            expected=first["msg"],
            found=".".join(map(str, first["loc"])),
        ) from error
    if config.fingerprint != meta.fingerprint:
        raise _torn("its config does not have its fingerprint", expected=meta.fingerprint, found=config.fingerprint)
    return config


def require_same_config(
    kept: CacheConfig,
    asked: CacheConfig,
    *,
    message: str = "the kept weights are of another configuration, so they are loaded anew",
    next_step: str = "restart the daemon with the earlier options if the kept weights are what is wanted",
) -> None:
    """Raises ConfigurationError naming the fields in which the kept weights are not what was asked for."""
    if kept.fingerprint == asked.fingerprint:
        return
    differences = explain_differences(kept.entries(), asked.entries())
    shown = [f"{one.field}: kept {one.daemon!r}, asked for {one.client!r}" for one in differences[:_FIELDS_SHOWN]]
    if more := len(differences) - len(shown):
        shown.append(f"and {more} more")
    raise ConfigurationError(message, found="; ".join(shown), next_step=next_step)


def with_options(kept: CacheConfig, options: ServeOptions, memory: Memory) -> CacheConfig:
    """The config that the options ask for, as far as it can be told without ``config.json`` and without the engine that
    makes the layout: whatever those decide is as it was. Raises ConfigurationError for the layout of another maker.
    """
    if options.layout != kept.layout and not {options.layout, kept.layout} <= LAYOUT_REVISIONS.keys():
        raise ConfigurationError("the kept weights are of another layout", expected=options.layout, found=kept.layout)
    return kept.model_copy(
        update={
            "layout": options.layout,
            "layout_revision": LAYOUT_REVISIONS.get(options.layout, kept.layout_revision),
            "parallel": options.parallel.model_dump(),
            "dtype": options.dtype,
            "quantization": Quantization.named(options.quantization).model_dump(),
            "memory": memory,
            "device": options.device,
        }
    )
