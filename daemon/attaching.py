"""A client asks for weights: what it is told, frame by frame, until it is granted, refused, or has to prove itself.

Owns the answer to one ``Hello`` (config first, then the daemon's state, then content) and to one ``Resume``. Waiting
clients get ``Loading`` at once and then every second. Knows nothing of sockets; ``connection.py`` sends what is said
here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from weightcached.daemon.generation import Generation
from weightcached.daemon.proof import Denied, Granted, NotProven, prove
from weightcached.daemon.record import Published, Record
from weightcached.daemon.refusals import mismatch, refusal
from weightcached.daemon.states import State
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import (
    CheckpointUnproven,
    DaemonDraining,
    DaemonFailed,
    DaemonNotReady,
    GenerationGone,
    WeightCacheError,
)
from weightcached.protocol.messages import WAIT_MAX_S, Hello, Loading, Refused, Resume, Unproven

LOADING_INTERVAL_S = 1.0

Answer = Generation | Refused | Unproven | Loading
"""What to do next for a Hello: grant this, say this and be done, or say this and wait."""


async def attend(
    hello: Hello, record: Record, tell: Callable[[Loading], Awaitable[None]], *, uid: int
) -> Generation | Refused | Unproven:
    """Wait until there is an answer, telling the client (of user ``uid``) how far things are, at most as long as it
    wants to wait.
    """
    return await _attend(lambda: answer_now(hello, record, uid=uid), hello.wait_s, record, tell)


async def attend_resume(
    resume: Resume, record: Record, tell: Callable[[Loading], Awaitable[None]]
) -> Generation | Refused:
    """Wait, telling the client so, until it is known what is served here."""
    answer = await _attend(lambda: resume_now(resume, record), WAIT_MAX_S, record, tell)
    if isinstance(answer, Unproven):
        raise TypeError("a resumed lease needs no proof")
    return answer


async def _attend(
    now: Callable[[], Answer], wait_s: float, record: Record, tell: Callable[[Loading], Awaitable[None]]
) -> Generation | Refused | Unproven:
    deadline = Deadline.after(wait_s)
    while isinstance(answer := now(), Loading):
        if deadline.passed:
            return refusal(_not_ready(answer, wait_s))
        await tell(answer)
        await record.changes.wait(min(LOADING_INTERVAL_S, deadline.remaining_s()))
    return answer


def resume_now(resume: Resume, record: Record) -> Answer:
    """The answer to an engine that holds weights already, at this moment. Never ``Unproven``: it has been granted."""
    if record.state in (State.STARTING, State.ADOPTING):
        return record.progress.current
    if record.state in (State.DRAINING, State.STOPPED):
        return refusal(_draining())
    if record.state is State.FAILED:
        return refusal(_failed(record.last_error))
    generation = record.published.generation if record.published is not None else None
    if generation is not None and generation.id == resume.generation:
        if generation.manifest_sha256 == resume.manifest_sha256:
            return generation
        found = f"its manifest is {generation.manifest_sha256}"
    else:
        found = f"generation {generation.id}" if generation is not None else "weights that are being loaded anew"
    return refusal(
        GenerationGone(
            "the daemon does not serve this generation any more; the weights in use stay valid",
            expected=f"generation {resume.generation}, manifest {resume.manifest_sha256}",
            found=found,
            next_step="restart the engine to change over to what is served now",
        )
    )


def answer_now(hello: Hello, record: Record, *, uid: int) -> Answer:
    """The answer at this moment. May start a digest that the client's proof needs. Raises ProtocolError."""
    if record.state in (State.DRAINING, State.STOPPED):
        return refusal(_draining())
    if record.config is not None and (refused := mismatch(record.config, hello)) is not None:
        return refused
    if record.state is State.FAILED:
        return refusal(_failed(record.last_error))
    if record.published is None:
        return record.progress.current
    return _content(hello, record.published, uid)


def _content(hello: Hello, published: Published, uid: int) -> Answer:
    generation, digesting = published.generation, published.digesting
    verdict = prove(hello, generation, published.proven, uid=uid)
    if isinstance(verdict, Granted):
        return generation
    if isinstance(verdict, Denied):
        return refusal(verdict.error)
    if generation.digest is None:
        digesting.start()  # the client is about to need it, if it does not already
    if isinstance(verdict, NotProven):
        return Unproven(reason=verdict.reason, rule=verdict.rule)
    if digesting.running:
        return Loading(stage="digest", bytes_done=0, bytes_total=0, bytes_per_s=0.0)
    return refusal(
        CheckpointUnproven(
            "the daemon could not compute its own content digest, so the client's proves nothing",
            expected=f"digest {hello.digest}" if hello.digest is not None else f"version {hello.want}",
            found=str(digesting.failure),
            where=generation.provenance.path,
            next_step='restart the daemon if its checkpoint was replaced, or ask for "current" if that is meant',
        )
    )


def _draining() -> DaemonDraining:
    return DaemonDraining("the daemon is stopping", next_step="start the engine again when a daemon serves this place")


def _failed(cause: WeightCacheError | None) -> DaemonFailed:
    return DaemonFailed(
        "the daemon could not load its weights",
        found=f"{cause.code}: {cause}" if cause is not None else None,
        next_step=(cause.next_step if cause is not None else None) or "see the daemon's log, then restart it",
    )


def _not_ready(progress: Loading, waited_s: float) -> DaemonNotReady:
    return DaemonNotReady(
        "the daemon was not ready in time",
        expected=f"ready within {waited_s:g} s",
        found=f"stage {progress.stage!r}, {progress.bytes_done} of {progress.bytes_total} bytes",
        next_step="wait longer: the load goes on",
    )
