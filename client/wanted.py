"""Which weights an attach wants: the checkpoint, its config, and what may help to prove its content.

Owns the evidence for it, and the last look at what was granted. Called by ``attach.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightcached.client.evidence import Evidence, gather, prove
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import CheckpointUnproven, TransferError
from weightcached.protocol.messages import Grant


@dataclass(frozen=True)
class Wanted:
    """``want`` is ``checkpoint``, ``current`` or a version; ``digest`` states the checkpoint's content."""

    model_dir: Path
    config: CacheConfig
    want: str
    digest: str | None
    cache_dir: Path | None
    also_trusted: frozenset[str]

    def evidence(self) -> Evidence:
        """What there is to say about the content, read from the files' metadata."""
        if self.want != "checkpoint":
            return Evidence()
        return gather(self.model_dir, digest=self.digest, also_trusted=self.also_trusted)

    def require_some(self, evidence: Evidence) -> None:
        """Without any evidence, and without a version to name, there is nothing to ask a daemon."""
        if self.want == "checkpoint" and evidence.empty:
            raise CheckpointUnproven(
                "nothing here says which content is wanted: the directory shows no weights, and no digest was stated",
                expected="weight files, a sidecar, or a digest",
                found="config.json only",
                where=self.model_dir,
                next_step="pass digest=… (the first word that `weightcached digest DIR` prints where the weights are), "
                "or mount the sidecar too",
            )

    def proven(self, evidence: Evidence, deadline: Deadline) -> Evidence:
        """``evidence`` with the content's digest. Blocks, possibly for a pass over all bytes."""
        return prove(
            self.model_dir, evidence, cache_dir=self.cache_dir, also_trusted=self.also_trusted, deadline=deadline
        )

    def accepts_version(self, version: str, receipts_version: str) -> bool:
        """Whether weights of these versions are those that are wanted, as far as versions say."""
        return self.want in ("checkpoint", "current", version, receipts_version)

    def require_granted(self, grant: Grant, where: str) -> None:
        """The daemon compares content; this catches one that grants what it itself says is something else."""
        if self.digest is not None and grant.digest != self.digest:
            raise TransferError(
                "the daemon granted other content than was asked for",
                expected=f"digest {self.digest}",
                found=f"digest {grant.digest}",
                where=where,
            )
        if not self.accepts_version(grant.version, grant.receipts_version):
            raise TransferError(
                "the daemon granted another version than was asked for",
                expected=self.want,
                found=f"{grant.version} ({grant.receipts_version})",
                where=where,
            )
