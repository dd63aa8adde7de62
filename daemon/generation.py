"""One published set of weights as the keeper knows it: descriptors, sizes, identity. No row of the manifest is decoded
here.

Owns the descriptors (through :class:`OwnedFds`) and making the ``Grant`` that hands out read-only ones. Immutable, but
for what becomes known later (digest, version): that makes another object with the same descriptors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import hashlib
import os
from dataclasses import dataclass

from weightcached.daemon.holder import Holder
from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import MemoryKind, kind_of
from weightcached.protocol.messages import AccountingCounts, Grant, SegmentInfo
from weightcached.protocol.transaction import Versions

_HASH_PIECE_BYTES = 256 * 1024
_UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True)
class CheckpointReceipts:
    """What the worker found about the files it read, before and after reading them."""

    sha256: str
    trusted: bool
    rule: str
    """Why they are trusted or not."""

    @classmethod
    def unknown(cls, rule: str) -> CheckpointReceipts:
        """Stands where nothing is known of the files, and proves nothing; ``rule`` says why."""
        return cls(_UNKNOWN, trusted=False, rule=rule)

    @property
    def known(self) -> bool:
        return self.sha256 != _UNKNOWN


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about the content of the files that weights were loaded from; ``path`` is where they lay."""

    digest: str | None
    receipts: CheckpointReceipts
    path: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights were loaded from: an absolute path, and the hub id where that was what ``--model`` said."""

    model_dir: str
    hub_id: str | None

    @classmethod
    def of(cls, path: str, *, hub_id: str | None = None) -> Origin:
        """Raises InvalidOption for a path that is no text: neither the worker nor the state record can be told it."""
        absolute = os.path.abspath(path)
        try:
            absolute.encode()
        except UnicodeEncodeError as error:
            raise InvalidOption(
                "the checkpoint's path is not UTF-8 in this process's locale",
                found=ascii(absolute),
                next_step="name a link to it that is, or set a UTF-8 locale if it is one",
            ) from error
        return cls(absolute, hub_id)

    def is_what(self, model: str) -> bool:
        """Whether ``model``, an option's value, names the same: by words alone, since files may have vanished."""
        return model == self.hub_id or os.path.abspath(model) == self.model_dir


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Whoever holds it frees it when nobody is to be granted it any more; engines that map it keep their pages, unless
    these are a holder's.
    """

    id: str
    config: CacheConfig
    memory: OwnedFds
    """The manifest, then each segment: all published, so that nobody writes there. Where there is a holder, then what
    tells of its end, and its cord.
    """
    manifest_nbytes: int
    manifest_sha256: str
    segments_nbytes: tuple[int, ...]
    resident_nbytes: int
    bytes_read: int
    bytes_kept: int
    accounting: AccountingCounts
    receipts: CheckpointReceipts
    receipts_version: str
    """Stands in while there is no digest."""
    digest: str | None
    provenance: Provenance
    origin: Origin
    seconds: dict[str, float]
    engine_inputs: str | None = None
    """What the key of the engine that made the layout was computed from, as one hash."""
    under_model: str | None = None
    """What ``--model`` said when they came by a change; ``None`` where they came because of ``--model``."""
    pushed_by: str | None = None
    """Who pushed them, a trainer's word for itself; ``None`` for weights out of a checkpoint, whose files can be looked
    at. Of weights that were pushed ``receipts_version`` is the version that they were given."""
    holder: Holder | None = None
    """The process whose memory it is, where it dies with one. Closing ``memory`` lets it go."""

    @property
    def kind(self) -> MemoryKind:
        """Of its segments."""
        return kind_of(self.config)

    @property
    def segments(self) -> list[int]:
        """Their descriptors, which stay its own."""
        return [self.memory[position] for position in range(1, 1 + len(self.segments_nbytes))]

    @property
    def version(self) -> str:
        """The best that is known: by digest, or by receipts while there is none."""
        if self.digest is None:
            return self.receipts_version
        return version_of(self.config.rankless_fingerprint, digest=self.digest, receipts=None)

    @property
    def versions(self) -> Versions:
        """What ranks compare."""
        return Versions(self.version, self.receipts_version)

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.digest, self.receipts, self.provenance.path)

    @property
    def came_from(self) -> str:
        """For people: who pushed it, or else the hub id or the directory that it was loaded from. A link may lead
        elsewhere by now: where it led then.
        """
        if self.pushed_by is not None:
            return f"pushed by {self.pushed_by}"
        return self.origin.hub_id or self.provenance.path

    def is_of(self, origin: Origin, receipts: CheckpointReceipts) -> bool:
        """Whether files that lie there with these receipts are seen to be those that it came from."""
        trusted = self.receipts.trusted and receipts.trusted
        return trusted and self.origin == origin and self.receipts.sha256 == receipts.sha256

    def with_digest(self, digest: str) -> Generation:
        """The same memory, its content digest now known."""
        return dataclasses.replace(self, digest=digest)

    def with_receipts(self, receipts: CheckpointReceipts) -> Generation:
        """The same memory; files with these receipts now were shown to be the ones it came from. The version that stood
        in for a digest stays what other ranks may have compared."""
        return dataclasses.replace(self, receipts=receipts)

    def grant(self, *, nonce: str) -> Grant:
        """The frame that describes it. :meth:`export` makes what travels with it."""
        return Grant(
            generation=self.id,
            version=self.version,
            receipts_version=self.receipts_version,
            nonce=nonce,
            manifest_sha256=self.manifest_sha256,
            manifest_nbytes=self.manifest_nbytes,
            segments=tuple(SegmentInfo(memory=self.config.memory, nbytes=nbytes) for nbytes in self.segments_nbytes),
            resident_nbytes=self.resident_nbytes,
            accounting=self.accounting,
            digest=self.digest,
            provenance=self.provenance,
        )

    def export(self) -> OwnedFds:
        """Read-only descriptors of the manifest and each segment, made for one client: nothing (not even a file offset)
        is shared with another's. Then what tells of the holder's end, where there is one. The caller closes them once
        they are sent."""
        segments = self.segments
        with OwnedFds() as made:
            made.append(host.export(self.memory[0]))
            for segment in segments:
                made.append(self.kind.export(segment))
            if self.holder is not None:
                made.append(fcntl.fcntl(self.memory[1 + len(segments)], fcntl.F_DUPFD_CLOEXEC, 0))
            return OwnedFds(made.take_all())

    async def free(self) -> None:
        """Nobody is to be granted it any more: close its memory, and wait until its holder, where it has one, has given
        that back. Safe to call twice.
        """
        self.memory.close()
        if self.holder is not None:
            await self.holder.gone()


async def sha256_of(fd: int, *, nbytes: int) -> str:
    """SHA-256 of the first ``nbytes`` bytes of a manifest. In pieces, so that no client waits for a large one."""
    digest = hashlib.sha256()
    for offset in range(0, nbytes, _HASH_PIECE_BYTES):
        digest.update(os.pread(fd, min(_HASH_PIECE_BYTES, nbytes - offset), offset))
        await asyncio.sleep(0)
    return digest.hexdigest()
