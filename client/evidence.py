"""What a client can say about the content it wants: receipts of the files it sees, or a digest it was told.

Owns gathering that evidence, and proving content by digest when the daemon asks for it. Called by ``attach.py``. It
never decides whether content matches: the daemon compares.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from weightcached.protocol.content import open_weights, take_receipts, weight_files, weights_visible
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.digest_cache import HEX
from weightcached.protocol.errors import ERRORS_BY_CODE, CheckpointUnproven, WeightCacheError
from weightcached.protocol.processes import python_command
from weightcached.protocol.sidecar import read_sidecar


class NotProvenInTime(CheckpointUnproven):
    """The deadline passed before the digest was known: of the content, this says nothing."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """``receipts`` (SHA-256, and whether they can prove anything) or a ``digest``; neither for a wanted version."""

    receipts: str | None = None
    receipts_trusted: bool = False
    digest: str | None = None

    @property
    def empty(self) -> bool:
        return self.receipts is None and self.digest is None


def gather(model_dir: Path, *, digest: str | None, also_trusted: Collection[str]) -> Evidence:
    """The evidence for ``model_dir``'s content. Reads no weight; waits while dirty pages of its files are written back.

    A stated ``digest`` is all the evidence there is: what receipts of the files here would prove is another claim.
    Without one: receipts, or, where no weights can be seen, what a sidecar states. Empty where nothing is known.
    Raises CheckpointError and its kin for files that cannot be a checkpoint.
    """
    if digest is not None:
        return Evidence(digest=digest)
    if not weights_visible(model_dir):
        sidecar = read_sidecar(model_dir)
        return Evidence(digest=None if sidecar is None else sidecar.digest)
    with open_weights(weight_files(model_dir)) as weights:
        receipts = take_receipts(weights, also_trusted=also_trusted)
    return Evidence(receipts=receipts.sha256, receipts_trusted=receipts.trusted)


def prove(
    model_dir: Path,
    evidence: Evidence,
    *,
    cache_dir: Path | None,
    also_trusted: Collection[str],
    deadline: Deadline,
) -> Evidence:
    """``evidence`` with the digest of exactly the files its receipts are of: remembered on this host, else computed.

    A process of its own computes it, because one pass over the bytes (or the wait for somebody else's pass) has to end
    at the deadline. Raises NotProvenInTime at the deadline, CheckpointChanged when the files are no longer those.
    """
    command = python_command("weightcached.protocol.digests", "--json", "--die-with-parent", str(os.getpid()))
    command += ["--expect-receipts", str(evidence.receipts)]
    command += [] if cache_dir is None else ["--cache-dir", str(cache_dir)]
    command += [word for name in sorted(also_trusted) for word in ("--trust-filesystem", name)]
    command += ["--", str(model_dir)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline.remaining_s())
    except subprocess.TimeoutExpired as error:
        raise NotProvenInTime(
            "the digest of the checkpoint was not known before the deadline",
            where=model_dir,
            next_step=f"allow more time, or run `weightcached digest {model_dir}` on this host beforehand",
        ) from error
    digest = _answer(done.stdout, done.stderr, done.returncode, where=model_dir)
    return Evidence(receipts=evidence.receipts, receipts_trusted=evidence.receipts_trusted, digest=digest)


def _answer(output: bytes, complaint: bytes, code: int, *, where: Path) -> str:
    try:
        document = json.loads(output)
        if "error" in document:
            raise _as_error(document["error"])
        digest = document["digest"]
        if isinstance(digest, str) and HEX.fullmatch(digest):
            return digest
    except (ValueError, TypeError, KeyError):
        pass  # not the one line of JSON it should be: said below, with what it said instead
    raise CheckpointUnproven(
        "the process that computes the checkpoint's digest failed",
        found=f"exit code {code}: {complaint.decode(errors='replace').strip()[-500:]}",
        where=where,
        next_step=f"run `weightcached digest {where}` to see why",
    )


def _as_error(fields: dict[str, str | None]) -> WeightCacheError:
    kind = ERRORS_BY_CODE.get(fields["code"] or "", WeightCacheError)
    return kind(
        fields["message"] or "",
        expected=fields["expected"],
        found=fields["found"],
        where=fields["where"],
        next_step=fields["next_step"],
    )
