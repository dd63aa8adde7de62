"""A client asks for weights: what it is told, frame by frame, until it is granted, refused, or has to prove itself.

Owns the answer to one ``Hello`` (config first, then the daemon's state, then content), to one ``Resume`` and to one
``Switch``. Any generation that is held and was served may be granted; what a change has prepared is not. Waiting
clients get ``Loading`` at once and then every second. Knows nothing of sockets; ``connection.py`` sends what is said
here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from weightcached.daemon.generation import Generation
from weightcached.daemon.generations import Published, is_version
from weightcached.daemon.proof import Denied, Granted, NeedsOurDigest, NotProven, Verdict, prove
from weightcached.daemon.record import Record
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
from weightcached.protocol.messages import WAIT_MAX_S, Hello, Loading, Refused, Resume, Switch, Unproven

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
    held = record.generations.served(resume.generation)
    if held is not None:
        if held.generation.manifest_sha256 == resume.manifest_sha256:
            return held.generation
        found = f"its manifest is {held.generation.manifest_sha256}"
    else:
        found = _what_is_held(record)
    return refusal(
        GenerationGone(
            "the daemon does not serve this generation any more; the weights in use stay valid",
            expected=f"generation {resume.generation}, manifest {resume.manifest_sha256}",
            found=found,
            next_step="restart the engine to change over to what is served now",
        )
    )


def switch_now(switch: Switch, record: Record) -> Generation | Refused:
    """The answer to an engine that has a lease and asks for another generation, at this moment. May have the leader's
    record read.
    """
    if record.state in (State.DRAINING, State.STOPPED):
        return refusal(_draining())
    if switch.generation is not None:
        held = record.generations.served(switch.generation)
    elif switch.version is not None:
        held = record.generations.of_version(switch.version)
    else:
        held = record.published
    wrong_version = switch.version is not None and held is not None and not is_version(held.generation, switch.version)
    if held is not None and not wrong_version:
        return held.generation
    if held is None and switch.version is not None and record.awaits_decision(switch.version):
        return refusal(
            DaemonNotReady(
                "this rank has prepared the version that is asked for, and has not read yet that it may serve it",
                expected=f"version {switch.version}",
                found=_what_is_held(record),
                next_step="ask again: the decision is being read",
            )
        )
    if held is None and switch.version is not None and _may_be_known_soon(record):
        return refusal(
            DaemonNotReady(
                "this rank computes the content digest of what it holds, which may be the version that is asked for",
                expected=f"version {switch.version}",
                found=_what_is_held(record),
                next_step="ask again: the digest will be known, or said not to be",
            )
        )
    named = {"generation": switch.generation, "version": switch.version}
    return refusal(
        GenerationGone(
            "the daemon does not serve the generation that is asked for; the lease stays what it was",
            expected=", ".join(f"{what} {word}" for what, word in named.items() if word is not None),
            found=_what_is_held(record),
            next_step="go on with the weights in use, or ask for what is served now",
        )
    )


def _may_be_known_soon(record: Record) -> bool:
    """Whether one of those that are granted is about to have another version than the one that stands in for it."""
    return any(one.generation.digest is None and one.digesting.running for one in record.generations.granted)


def _what_is_held(record: Record) -> str:
    held = ", ".join(f"generation {one.generation.id}" for one in record.generations.granted)
    return held or "weights that are being loaded anew"


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
    if record.generations.of_version(hello.want) is None and record.awaits_decision(hello.want):
        return Loading(stage="change", bytes_done=0, bytes_total=0, bytes_per_s=0.0)
    return _content(hello, *_best(hello, record.generations.granted, uid))


def _best(hello: Hello, granted: list[Published], uid: int) -> tuple[Published, Verdict]:
    """The generation that is what the client wants, the current one first; else the one that may still be shown to be;
    else the current one, with why it is not.
    """
    verdicts = [(one, prove(hello, one.generation, one.proven, uid=uid)) for one in granted]
    for kinds in (Granted, NeedsOurDigest | NotProven):
        for published, verdict in verdicts:
            if isinstance(verdict, kinds):
                return published, verdict
    return verdicts[0]


def _content(hello: Hello, published: Published, verdict: Verdict) -> Answer:
    generation, digesting = published.generation, published.digesting
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
