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


class Digesting:
    """Computes the digest of the files that were loaded: ``expected`` are their receipts.

    ``on_digest`` hears of it; ``on_end`` of the end of every attempt, when :attr:`running` is false again.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        expected: CheckpointReceipts,
        cache_dir: Path | None,
        trusted_filesystems: tuple[str, ...],
        on_digest: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._arguments = [str(model_dir), "--json", "--low-priority", "--expect-receipts", expected.sha256]
        if cache_dir is not None:
            self._arguments += ["--cache-dir", str(cache_dir)]
        for name in trusted_filesystems:
            self._arguments += ["--trust-filesystem", name]
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
            child = await Child.start("digest", MODULE, [*self._arguments, *parent_arguments()], answers=True)
            try:
                answer = await child.answer()
            finally:
                await child.end()
            digest = answer.get("digest")
            if not isinstance(digest, str):
                raise ContractError("the digest process answered without a digest", found=sorted(answer))
        except (WeightCacheError, OSError) as error:
            self.failure = error if isinstance(error, WeightCacheError) else ContractError(str(error))
            self._failed_s = time.monotonic()
            log.warning("no content digest", extra={"error": str(error)})
            return
        log.info(
            "content digest",
            extra={key: answer.get(key) for key in ("digest", "source", "seconds", "nbytes", "remembered")},
        )
        self._on_digest(digest)

    async def stop(self) -> None:
        """End the process, if one runs."""
        if self._attempt is not None:
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
