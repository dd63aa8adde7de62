"""A running engine of vLLM takes another generation: on all of its workers, between two steps, or on none.

Owns both sides. :class:`WeightSwitching` is mixed into vLLM's workers, by vLLM's own way to do so
(``worker_extension_cls``): a worker does one thing at a time, so none of this runs within a step. That all ranks swap
or none is the workers' own business, whoever calls them. :func:`switch_weights` is for whoever has the engine: stage
everywhere, compare versions, pause, swap, drop caches, go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from weightcached.client.agreement import Standing, agree, require_agreement
from weightcached.client.stale import STALE_EXIT, end_stale
from weightcached.client.swap import Staged, Swapped
from weightcached.client.vllm import swapping
from weightcached.client.vllm.together import exchange
from weightcached.client.weights import WeightSet
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    ERRORS_BY_CODE,
    DaemonNotReady,
    InternalError,
    RanksDisagree,
    SwapFailed,
    SwapRefused,
    WeightCacheError,
)
from weightcached.protocol.ranks import rank_word

if TYPE_CHECKING:
    from weightcached.client.swap import Changed

EXTENSION = f"{__name__}.WeightSwitching"
"""For vLLM's ``worker_extension_cls``. It takes one class: another extension may inherit this one."""
_POLL_S = 0.02
_BACK_TIMEOUT_S = 60.0
"""For the daemon to give the version before once more: until then no rank computes."""


class WeightSwitching:
    """Mixed into vLLM's worker. Answers are maps of text and numbers; an error is its ``code`` and ``error``."""

    model_runner: Any
    vllm_config: Any
    _weightcached_staging: _Staging | None = None

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
        return self._weightcached_has(given.weights, staging.staged).model_dump()

    def weightcached_swap(self, changed: Changed) -> dict[str, Any]:
        """Move in what was prepared; the result's fields, or ``code`` and ``error``. On all ranks or on none, and no
        step is in between: each tells the others what it has now, and unless all have swapped to one version, those
        that have take back the one before.

        A rank ends its process where its weights are lost, or it cannot take back; and then so do the others, which
        hear nothing of it any more: nobody computes with different weights on different ranks.
        """
        try:
            return self._weightcached_swap(changed)
        finally:
            self.weightcached_give_up()

    def _weightcached_swap(self, changed: Changed) -> dict[str, Any]:
        staging, model = self._weightcached_staging, self.model_runner.get_model()
        given = swapping.served(model)
        if given is None or staging is None or staging.staged is None:
            done, answer = None, _said(InternalError("nothing was staged"))
        else:
            done, answer = _moved_in(model, given, staging.staged, changed)
        weights = None if given is None else given.weights
        standings = self._weightcached_told(weights, answer.get("error"))
        failed = [f"{standing.rank}: {standing.error}" for standing in standings if standing.error is not None]
        if not failed and agree(standings):
            return answer
        if done is not None and given is not None:
            _take_back(model, given, done)
            answer = _said(
                RanksDisagree(
                    "not all ranks could swap to one version, and this one has taken back the one before",
                    expected=f"{done.to_version} on all ranks",
                    found="; ".join(failed) or " | ".join(" ".join(standing.row()) for standing in standings),
                )
            )
        if not agree(self._weightcached_told(weights, None)):
            _end("after a swap that failed the ranks have different weights")
        return answer

    def _weightcached_told(self, weights: WeightSet | None, error: str | None) -> list[Standing]:
        """What every rank has now, once it knows this of this one. Ends the process where one does not say it."""
        from vllm.distributed.parallel_state import get_world_group

        mine = self._weightcached_has(weights, weights, error)
        group = get_world_group()
        if group.world_size == 1:
            return [mine]
        try:
            return exchange(mine, group.cpu_group)
        except (RuntimeError, ValueError) as failure:
            _end(f"what other ranks have after a swap is not known: {failure}")

    def _weightcached_has(
        self, weights: WeightSet | None, what: WeightSet | Staged | None, error: str | None = None
    ) -> Standing:
        """``what`` is in use, or staged, for ``weights``; None: vLLM's own loader has loaded them."""
        from weightcached.client.vllm.ranks import parallel_of

        return Standing(
            rank=rank_word(parallel_of(self.vllm_config, self.vllm_config.model_config)),
            place="" if weights is None or weights.lease is None else weights.lease.where,
            source="disk" if what is None else "daemon",
            version=None if what is None else what.version,
            receipts_version=None if what is None else what.receipts_version,
            generation=None if what is None else what.generation,
            error=error,
        )

    def weightcached_give_up(self) -> None:
        """Forget what was prepared, once it is."""
        staging, self._weightcached_staging = self._weightcached_staging, None
        if staging is not None:
            staging.close()


def _moved_in(
    model: Any, given: swapping.Served, staged: Staged, changed: Changed
) -> tuple[Swapped | None, dict[str, Any]]:
    """What was done, and the answer to it; or None, and an error after which the weights are what they were. Ends the
    process where they are not.
    """
    try:
        with given.weights.barrier.stopped() as stopped:
            done = swapping.swap_in(model, given, staged, stopped, changed=changed)
    except WeightCacheError as error:
        if isinstance(error, SwapFailed) and not error.intact:
            _end(f"the weights are lost: {error}")
        return None, _said(error)
    except Exception as error:  # noqa: BLE001  # some of it may have been done: nobody computes with it
        _end(f"the weights are lost: {type(error).__name__}: {error}")
    return done, {
        "from_version": done.from_version,
        "to_version": done.to_version,
        "generation": done.to_generation,
        "populate_s": done.populate_s,
        "swap_s": done.swap_s,
        "barrier_s": stopped.seconds,
        "changed": list(done.changed),
    }


def _take_back(model: Any, given: swapping.Served, done: Swapped) -> None:
    """Have the generation that was in use before ``done``. Ends the process where that cannot be."""
    try:
        with (
            given.weights.stage(generation=done.from_generation, timeout_s=_BACK_TIMEOUT_S) as staged,
            given.weights.barrier.stopped() as stopped,
        ):
            swapping.swap_in(model, given, staged, stopped, changed="discard")
    except Exception as error:  # noqa: BLE001  # whatever it was: the other ranks have the version before
        _end(f"other ranks could not swap, and the version before cannot be taken back here: {error}")


def _end(reason: str) -> NoReturn:
    end_stale(f"{reason}; this worker ends with status {STALE_EXIT}, for its engine to be started again")


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

    Each rank prepares it; versions are compared. Then vLLM is paused, unless it is already; each rank moves it in, vLLM
    drops its prefix and encoder caches, and goes on: no step computes with new weights over what the old ones left.
    Requests under way are computed again from their tokens so far.

    Raises what a rank raised, or RanksDisagree where their daemons have different versions; then every rank has what it
    had. Where that cannot be, the workers end, and vLLM raises that they are gone. SwapFailed where vLLM could not drop
    its caches: it stays paused.

    The result of each rank: versions, generation, seconds of preparing, of the exchange and of the barrier, and names
    of parameters that it had written to and lost.
    """
    llm.collective_rpc("weightcached_stage", args=(version, timeout_s))
    try:
        standings = _standings(llm, Deadline.after(timeout_s))
        _raise_any(standings)
        require_agreement([Standing.model_validate(standing) for standing in standings])
        paused = llm.llm_engine.is_sleeping()
        if not paused:
            llm.sleep(level=0, mode="keep")
    except BaseException:
        llm.collective_rpc("weightcached_give_up")
        raise
    results: list[dict[str, Any]] = llm.collective_rpc("weightcached_swap", args=(changed,))
    if not any("error" in result for result in results):
        _drop_caches(llm)
    if not paused:
        llm.wake_up(tags=["scheduling"])
    # What has failed first, and then those that have taken back because of it.
    _raise_any(sorted(results, key=lambda result: result.get("code") == RanksDisagree.code))
    return results


def _drop_caches(llm: Any) -> None:
    """Whatever vLLM has computed with the weights before."""
    if not llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise SwapFailed(
            "the weights were switched, and what vLLM has cached of those before could not be dropped",
            expected="nothing in the prefix cache, nor behind its connector",
            found="reset_prefix_cache() returned False",
            next_step="the engine is paused: reset_prefix_cache() again, then wake_up(['scheduling']); or end it",
            intact=False,
        )
    llm.llm_engine.reset_encoder_cache()


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
