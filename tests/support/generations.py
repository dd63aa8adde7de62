"""Generations as the keeper knows them, without memory, for tests of what is decided about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from weightcached.daemon.digesting import Digesting
from weightcached.daemon.generation import CheckpointReceipts, Generation, Origin
from weightcached.daemon.generations import Published
from weightcached.daemon.proof import ProvenReceipts
from weightcached.protocol.config import CacheConfig, Parallel, Provenance
from weightcached.protocol.content import version_of
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.messages import AccountingCounts

OURS = "a" * 64
"""The receipts of the files they came from."""


def generation(*, digest: str | None = None, trusted: bool = True, **changes: Any) -> Generation:
    """Without any memory; ``changes`` replace its fields."""
    config = CacheConfig(
        architecture="X", layout="hf", layout_revision=1, parallel=Parallel(tp_size=1, tp_rank=0), model={}
    )
    made = Generation(
        id="0" * 32,
        config=config,
        memory=OwnedFds(),
        manifest_nbytes=0,
        manifest_sha256="0" * 64,
        segments_nbytes=(),
        resident_nbytes=0,
        bytes_kept=0,
        bytes_read=0,
        accounting=AccountingCounts(expected=0, loaded=0, ignored=0, unexpected=0),
        receipts=CheckpointReceipts(OURS, trusted=trusted, rule="ext4 is trusted" if trusted else "fuse is not"),
        receipts_version=version_of(config.rankless_fingerprint, digest=None, receipts=OURS),
        digest=digest,
        provenance=Provenance(path="/model", host="h"),
        origin=Origin("/model", None),
        seconds={},
    )
    return dataclasses.replace(made, **changes)


def published(one: Generation, *, staged: bool = False) -> Published:
    """As it is held. Its digest is computed only if somebody starts that."""
    digesting = Digesting(
        one.origin.model_dir,
        expected=one.receipts,
        cache_dir=None,
        trusted_filesystems=(),
        on_digest=lambda digest: None,
        on_end=lambda: None,
    )
    return Published(generation=one, proven=ProvenReceipts(), digesting=digesting, staged=staged)
