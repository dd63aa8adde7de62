"""One published set of weights as the keeper knows it: descriptors, sizes, identity. No row of the manifest is decoded
here.

Owns the descriptors (through :class:`OwnedFds`) and making the ``Grant`` that hands out read-only ones. Immutable, but
for what becomes known later (digest, version): that makes another object with the same descriptors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from weightcached.protocol.config import CacheConfig, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.messages import AccountingCounts, Grant, SegmentInfo


@dataclass(frozen=True, slots=True)
class CheckpointReceipts:
    """What the worker found about the files it read, before and after reading them."""

    sha256: str
    trusted: bool
    rule: str
    """Why they are trusted or not."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Whoever holds it closes ``memory`` when nobody is to be granted it any more; engines that map it keep their
    pages.
    """

    id: str
    config: CacheConfig
    memory: OwnedFds
    """The manifest, then each segment: all sealed."""
    manifest_nbytes: int
    manifest_sha256: str
    segments_nbytes: tuple[int, ...]
    resident_nbytes: int
    bytes_read: int
    accounting: AccountingCounts
    receipts: CheckpointReceipts
    digest: str | None
    provenance: Provenance
    seconds: dict[str, float]

    @property
    def receipts_version(self) -> str:
        return version_of(self.config.rankless_fingerprint, digest=None, receipts=self.receipts.sha256)

    @property
    def version(self) -> str:
        """The best that is known: by digest, or by receipts while there is none."""
        return version_of(self.config.rankless_fingerprint, digest=self.digest, receipts=self.receipts.sha256)

    def with_digest(self, digest: str) -> Generation:
        """The same memory, its content digest now known."""
        return dataclasses.replace(self, digest=digest)

    def grant(self, *, nonce: str) -> Grant:
        """The frame that describes it. :meth:`export` makes what travels with it."""
        return Grant(
            generation=self.id,
            version=self.version,
            receipts_version=self.receipts_version,
            nonce=nonce,
            manifest_sha256=self.manifest_sha256,
            manifest_nbytes=self.manifest_nbytes,
            segments=tuple(SegmentInfo(memory="host", nbytes=nbytes) for nbytes in self.segments_nbytes),
            resident_nbytes=self.resident_nbytes,
            accounting=self.accounting,
            digest=self.digest,
            provenance=self.provenance,
        )

    def export(self) -> OwnedFds:
        """Read-only descriptors of the manifest and each segment, made for one client: nothing (not even a file offset)
        is shared with another's. The caller closes them once they are sent."""
        with OwnedFds() as made:
            for position in range(len(self.memory)):
                made.append(host.export(self.memory[position]))
            return OwnedFds(made.take_all())
