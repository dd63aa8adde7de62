"""Our own content digest, computed by a low-priority process after publishing, unless it was remembered.

Owns that process and what came of it. Serving never waits for it, except a client whose proof needs it. A failure is
kept, told to whoever needs the digest, and tried again for the next one who does, but not more often than every few
seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weightcached.daemon.children import Child, parent_arguments
from weightcached.daemon.generation import CheckpointReceipts
from weightcached.protocol.digest_cache import DigestCache, cache_directory
from weightcached.protocol.errors import ContractError, WeightCacheError

MODULE = "weightcached.protocol.digests"
RETRY_INTERVAL_S = 10.0

log = logging.getLogger(__name__)


def remembered(receipts: CheckpointReceipts, cache_dir: Path | None) -> str | None:
    """What this host's cache says about these receipts, when they are to be trusted. Reads one small file."""
    if not receipts.trusted:
        return None
    warnings: list[str] = []
    try:
        with DigestCache(cache_directory(cache_dir)).opened(warnings) as shelf:
            digest = shelf.recall(receipts.sha256)
    except WeightCacheError as error:
        warnings.append(str(error))
        digest = None
    for warning in warnings:
        log.warning("digest cache", extra={"warning": warning})
    return digest


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    """What the digest process found out about the files that are there now."""

    digest: str
    receipts: str | None
    """``None`` where there are no weights to see, and a sidecar answered."""
    settled: bool
    """Whether equal receipts prove this digest from now on."""
    rule: str | None
    """Why the receipts are trusted or not."""


async def compute(
    model: str,
    *,
    cache_dir: Path | None,
    trusted_filesystems: tuple[str, ...],
    expect_receipts: str | None = None,
) -> DigestAnswer:
    """Run the digest process on a directory or a hub id, to its end. Cancelled, it is killed.

    Raises CheckpointChanged when the files do not have the receipts that were expected, CheckpointError and its kin for
    files that cannot be read, ContractError for a process that does not answer, WorkerDied for one that was killed.
    """
    arguments = ["--json", "--low-priority", *parent_arguments()]
    if expect_receipts is not None:
        arguments += ["--expect-receipts", expect_receipts]
    if cache_dir is not None:
        arguments += ["--cache-dir", str(cache_dir)]
    for name in trusted_filesystems:
        arguments += ["--trust-filesystem", name]
    child = await Child.start("digest", MODULE, [*arguments, "--", model], answers=True)
    try:
        answer = await child.answer()
    finally:
        await child.end()
    digest = answer.get("digest")
    if not isinstance(digest, str):
        raise ContractError("the digest process answered without a digest", found=sorted(answer))
    log.info(
        "content digest",
        extra={key: answer.get(key) for key in ("digest", "source", "seconds", "nbytes", "remembered")},
    )
    return DigestAnswer(digest, answer.get("receipts"), answer.get("settled") is True, answer.get("rule"))


class Digesting:
    """Computes the digest of the files that were loaded: ``expected`` are their receipts.

    ``on_digest`` hears of it; ``on_end`` of the end of every attempt, when :attr:`running` is false again.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        expected: CheckpointReceipts,
        cache_dir: Path | None,
        trusted_filesystems: tuple[str, ...],
        on_digest: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._compute = partial(
            compute,
            model_dir,
            expect_receipts=expected.sha256,
            cache_dir=cache_dir,
            trusted_filesystems=trusted_filesystems,
        )
        self._on_digest = on_digest
        self._on_end = on_end
        self._attempt: asyncio.Task[None] | None = None
        self._failed_s = 0.0
        self.failure: WeightCacheError | None = None
        """Why the last attempt came to nothing."""

    @property
    def running(self) -> bool:
        return self._attempt is not None and not self._attempt.done()

    def start(self) -> None:
        """Begin an attempt unless one runs, or one failed only just now."""
        if self.running or (self.failure is not None and time.monotonic() - self._failed_s < RETRY_INTERVAL_S):
            return
        self.failure = None
        self._attempt = asyncio.create_task(self._run(), name="digest")
        self._attempt.add_done_callback(lambda _: self._on_end())

    async def _run(self) -> None:
        try:
            answer = await self._compute()
        except WeightCacheError as error:
            self.failure = error
            self._failed_s = time.monotonic()
            log.warning("no content digest", extra={"error": str(error)})
            return
        self._on_digest(answer.digest)

    async def stop(self) -> None:
        """End the process, if one runs."""
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
