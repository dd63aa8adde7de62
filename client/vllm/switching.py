"""A running engine of vLLM takes another generation: on all of its workers, between two steps, or on none.

Owns both sides. :class:`WeightSwitching` is mixed into vLLM's workers, by vLLM's own way to do so
(``worker_extension_cls``): a worker does one thing at a time, so none of this runs within a step.
:func:`switch_weights` is for whoever has the engine: stage everywhere, compare versions, swap, drop caches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightcached.client.agreement import Standing, require_agreement
from weightcached.client.swap import Staged
from weightcached.client.vllm import swapping
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    ERRORS_BY_CODE,
    DaemonNotReady,
    InternalError,
    RanksDisagree,
    SwapRefused,
    WeightCacheError,
)
from weightcached.protocol.ranks import rank_word

if TYPE_CHECKING:
    from weightcached.client.swap import Changed

EXTENSION = f"{__name__}.WeightSwitching"
"""For vLLM's ``worker_extension_cls``. It takes one class: another extension may inherit this one."""
_POLL_S = 0.02


class WeightSwitching:
    """Mixed into vLLM's worker. Answers are maps of text and numbers; an error is its ``code`` and ``error``."""

    model_runner: Any
    vllm_config: Any
    _weightcached_staging: _Staging | None

    def weightcached_published(self) -> tuple[str, ...]:
        """The versions, one or two, of what this rank's daemon grants now; none if that is in use."""
        given = swapping.served(self.model_runner.get_model())
        published = None if given is None else given.follower.pending()
        words = () if published is None else (published.version, published.receipts_version)
        return tuple(word for word in words if word is not None)

    def weightcached_stage(self, version: str | None, timeout_s: float) -> None:
        """Begin to prepare that version (None: the one that is granted now), beside the steps that go on."""
        self.weightcached_give_up()
        self._weightcached_staging = _Staging(self.model_runner.get_model(), version, timeout_s)

    def weightcached_standing(self) -> dict[str, Any] | None:
        """What was prepared, as a :class:`Standing`, or ``code`` and ``error``; None while it is not done."""
        staging, given = self._weightcached_staging, swapping.served(self.model_runner.get_model())
        if staging is None or not staging.done:
            return None
        if staging.staged is None or given is None:
            return staging.error
        from weightcached.client.vllm.ranks import parallel_of

        return Standing(
            rank=rank_word(parallel_of(self.vllm_config, self.vllm_config.model_config)),
            place="" if given.weights.lease is None else given.weights.lease.where,
            source="daemon",
            version=staging.staged.version,
            receipts_version=staging.staged.receipts_version,
            generation=staging.staged.generation,
        ).model_dump()

    def weightcached_swap(self, changed: Changed) -> dict[str, Any]:
        """Move in what was prepared; the result's fields, or ``code`` and ``error``."""
        staging, model = self._weightcached_staging, self.model_runner.get_model()
        given = swapping.served(model)
        if staging is None or staging.staged is None or given is None:
            return _said(InternalError("nothing was staged"))
        try:
            with staging.staged as staged, given.weights.barrier.stopped() as stopped:
                done = swapping.swap_in(model, given, staged, stopped, changed=changed)
        except WeightCacheError as error:
            return _said(error)
        finally:
            self._weightcached_staging = None
        return {
            "from_version": done.from_version,
            "to_version": done.to_version,
            "generation": done.to_generation,
            "populate_s": done.populate_s,
            "swap_s": done.swap_s,
            "barrier_s": stopped.seconds,
            "changed": list(done.changed),
        }

    def weightcached_give_up(self) -> None:
        """Forget what was prepared, once it is."""
        staging = getattr(self, "_weightcached_staging", None)
        self._weightcached_staging = None
        if staging is not None:
            staging.close()


class _Staging:
    """One generation being staged by a thread."""

    def __init__(self, model: Any, version: str | None, timeout_s: float) -> None:
        self.staged: Staged | None = None
        self.error: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, args=(model, version, timeout_s), name="weightcached-staging")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()
        if self.staged is not None:
            self.staged.close()

    def _run(self, model: Any, version: str | None, timeout_s: float) -> None:
        given = swapping.served(model)
        try:
            if given is None:
                raise SwapRefused("vLLM has loaded these weights itself", expected="weights of a daemon", found="disk")
            swapping.require_swappable(model, given)
            self.staged = given.weights.stage(version=version, timeout_s=timeout_s)
        except WeightCacheError as error:
            self.error = _said(error)
        except Exception as error:  # noqa: BLE001  # whoever waits is told, whatever it was
            self.error = _said(InternalError("staging failed", found=f"{type(error).__name__}: {error}"))


def published_version(llm: Any) -> str | None:
    """The version that the daemons of all ranks grant now, if it is not the one in use: None until they are one."""
    first, *others = llm.collective_rpc("weightcached_published")
    return next((version for version in first if all(version in other for other in others)), None)


def switch_weights(
    llm: Any, *, version: str | None = None, timeout_s: float = 600.0, changed: Changed = "refuse"
) -> list[dict[str, Any]]:
    """Have ``llm`` (vLLM's ``LLM``, with :data:`EXTENSION`) compute with another version on all ranks: that named, or
    the one that is granted now. Blocks; steps of other threads go on until the weights are moved in.

    Each rank prepares it; versions are compared; then each moves it in, and vLLM drops its prefix and encoder caches.
    Requests under way are computed again from their tokens so far. Raises what a rank raised, or RanksDisagree where
    their daemons have different versions; then every rank has what it had. Where some ranks have swapped and others
    could not, RanksDisagree says that the engine has to end.

    The result of each rank: versions, generation, seconds of preparing, of the exchange and of the barrier, and names
    of parameters that it had written to and lost.
    """
    llm.collective_rpc("weightcached_stage", args=(version, timeout_s))
    try:
        standings = _standings(llm, Deadline.after(timeout_s))
        _raise_any(standings)
        require_agreement([Standing.model_validate(standing) for standing in standings])
    except BaseException:
        llm.collective_rpc("weightcached_give_up")
        raise
    results: list[dict[str, Any]] = llm.collective_rpc("weightcached_swap", args=(changed,))
    failed = [result for result in results if "error" in result]
    if failed and len(failed) < len(results):
        raise RanksDisagree(
            "some ranks have swapped and others could not",
            expected="one version on all ranks",
            found="; ".join(str(result.get("error", result.get("to_version"))) for result in results),
            next_step="end this engine and start it again: its ranks compute with different weights",
        )
    _raise_any(results)
    llm.reset_prefix_cache(reset_running_requests=True)
    llm.llm_engine.reset_encoder_cache()
    return results


def _standings(llm: Any, deadline: Deadline) -> list[dict[str, Any]]:
    while True:
        found = llm.collective_rpc("weightcached_standing")
        if None not in found:
            return list(found)
        if deadline.passed:
            raise DaemonNotReady(
                "ranks were not ready to switch before the deadline", found=f"{found.count(None)} ranks"
            )
        time.sleep(_POLL_S)


def _said(error: WeightCacheError) -> dict[str, Any]:
    return {"code": error.code, "error": str(error)}


def _raise_any(answers: Sequence[Mapping[str, Any]]) -> None:
    for answer in answers:
        if "error" in answer and "code" in answer:
            raise ERRORS_BY_CODE[answer["code"]](answer["error"])
