"""Adopted weights are served before anybody has looked at the files they came from; this looks, in the background.

Owns the comparison of what was adopted with what lies on disk now, and asking again while the files cannot be read (an
outage ends some day). Reads the files in a low-priority process. Whatever comes of it, the weights stay: what is done
with a verdict is the keeper's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from weightcached.daemon.digesting import DigestAnswer, compute
from weightcached.daemon.generation import CheckpointReceipts, Evidence, Generation
from weightcached.daemon.options import ServeOptions
from weightcached.protocol.errors import CheckpointMismatch, WeightCacheError

RETRY_FIRST_S = 10.0
RETRY_MAX_S = 300.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proven:
    """The files are what is served. ``rule`` says how that is known; ``answer`` what they are like now."""

    rule: str
    answer: DigestAnswer

    @property
    def receipts(self) -> CheckpointReceipts | None:
        """Those that prove the same from now on, if there are such."""
        answer = self.answer
        if answer.receipts is None or not answer.settled:
            return None
        return CheckpointReceipts(answer.receipts, trusted=True, rule=f"{answer.rule}; {self.rule}")


@dataclass(frozen=True, slots=True)
class Contradicted:
    """The files are something else."""

    error: CheckpointMismatch


@dataclass(frozen=True, slots=True)
class Undecidable:
    """Nothing that is known about the weights can ever be compared with these files."""

    reason: str


Verdict = Proven | Contradicted | Undecidable


def compare(known: Evidence, answer: DigestAnswer) -> Verdict:
    """Are the files that ``answer`` describes those that weights were loaded from? Pure."""
    if known.digest is not None:
        if answer.digest == known.digest:
            return Proven("equal content digests", answer)
        return Contradicted(
            CheckpointMismatch(
                "the files on disk are not the weights that are served any more; these stay as they are",
                expected=f"content digest {known.digest}",
                found=f"content digest {answer.digest}",
                where=known.path,
                next_step="to serve what is on disk now: `weightcached release`, then start the daemon again; "
                "or put the files back",
            )
        )
    receipts = known.receipts
    if receipts.trusted and answer.settled and answer.receipts == receipts.sha256:
        return Proven(f"equal receipts ({receipts.rule})", answer)
    reason = "no content digest of the weights was known when their keeper ended, and "
    if receipts.trusted:
        return Undecidable(f"{reason}the receipts of the files are not the same any more")
    return Undecidable(f"{reason}receipts prove nothing here: {receipts.rule}")


class Reproving:
    """Looks until there is a verdict. Made and ended by the keeper; ``on_failure`` hears why there is none yet."""

    def __init__(
        self,
        options: ServeOptions,
        generation: Generation,
        *,
        on_verdict: Callable[[Verdict], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._options = options
        self._generation = generation
        # What a change has brought lies elsewhere than `--model` says.
        self._model = options.model if generation.under_model is None else generation.origin.model_dir
        self._on_verdict = on_verdict
        self._on_failure = on_failure
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prove again")

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                answer = await compute(
                    self._model,
                    cache_dir=self._options.cache_dir,
                    trusted_filesystems=self._options.trusted_filesystems,
                )
            except WeightCacheError as error:
                log.warning("not proven again yet", extra={"reason": str(error), "again_after_s": pause_s})
                self._on_failure(str(error))
            else:
                verdict = compare(self._generation.evidence, answer)
                log.info("proven again", extra={"verdict": type(verdict).__name__.lower()})
                self._on_verdict(verdict)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    @property
    def has_ended(self) -> bool:
        """There is a verdict, or it was ended and its process is gone."""
        return self._task is None or self._task.done()

    def cancel(self) -> None:
        """Begin to end it: nobody hears a verdict any more."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """End it, and the process that it may be waiting for. Safe to call twice, and before :meth:`start`."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})
