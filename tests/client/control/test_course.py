"""What a coordinator asks next, where the simulation does not look: why a change failed, for people."""

from __future__ import annotations

import pytest

from weightcached.client.control.course import (
    Answer,
    Change,
    Course,
    Phase,
    Refusal,
    Seen,
    Silence,
    Verb,
    after,
    asks,
    begin,
    end,
    given_up,
)
from weightcached.protocol.transaction import Decision, Held, Outcome, Versions

OLD = Held("g1", Versions("v1", "v1"))


def new(version: str = "v2") -> Held:
    return Held("g2", Versions(version, version))


def both(answer: Answer) -> dict[int, Answer]:
    return {0: answer, 1: answer}


def opened() -> Course:
    course = after(begin(2, "T"), both(Seen(OLD)))
    assert [(one.verb, one.base) for one in asks(course)] == [(Verb.OPEN, "g1")]
    return after(course, {0: Seen(OLD, None, "T")})


def preparing(*states: Change) -> Course:
    return after(opened(), {rank: Seen(OLD, state) for rank, state in enumerate(states)})


def test_each_rank_prepares_on_top_of_what_was_seen_there() -> None:
    others = Held("other", OLD.versions)
    course = after(begin(2, "T"), {0: Seen(OLD), 1: Seen(others)})
    course = after(course, {0: Seen(OLD, None, "T")})
    assert [(one.rank, one.verb, one.base) for one in asks(course)] == [
        (0, Verb.PREPARE, "g1"),
        (1, Verb.PREPARE, "other"),
    ]


def test_only_ranks_that_are_not_ready_are_waited_for() -> None:
    course = preparing(Change("T", "prepared", new()), Change("T", "preparing"))
    assert [(one.rank, one.verb) for one in asks(course)] == [(1, Verb.AWAIT)]
    done = after(course, {1: Seen(OLD, Change("T", "prepared", new()))})
    assert [one.verb for one in asks(done)] == [Verb.COMMIT]


def test_different_versions_are_never_committed() -> None:
    course = preparing(Change("T", "prepared", new("v2")), Change("T", "prepared", new("v3")))
    assert [one.verb for one in asks(course)] == [Verb.ABORT]
    assert course.failure is not None
    assert (course.failure.code, "v2" in course.failure.why) == ("checkpoint_changed", True)


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [
        (Refusal("insufficient_memory", "too large"), "insufficient_memory", "too large"),
        (Seen(OLD, Change("T", "failed", why="a bad file", code="truncated_file")), "truncated_file", "a bad file"),
        (Seen(OLD, Change("T", "failed", why="a bad file")), "worker_died", "a bad file"),
        (Seen(OLD), "worker_died", "its daemon ended while it prepared the change"),
        (
            Seen(OLD, Change("another", "prepared", new())),
            "worker_died",
            "its daemon ended while it prepared the change",
        ),
    ],
)
def test_the_first_rank_that_cannot_is_named(answer: Answer, code: str, why: str) -> None:
    course = after(opened(), {0: Seen(OLD, Change("T", "preparing")), 1: answer})
    assert [one.verb for one in asks(course)] == [Verb.ABORT]
    assert course.failure is not None
    assert (course.failure.rank, course.failure.code, course.failure.why) == (1, code, why)


def test_silence_is_asked_again_and_then_given_up() -> None:
    course = after(opened(), both(Silence()))
    assert course == opened()
    assert [one.verb for one in asks(given_up(course, "not in time"))] == [Verb.ABORT]


def test_it_is_known_whether_the_change_itself_was_opened_or_another_before_it() -> None:
    """The one is begun anew by who waits for others, and the other never: ranks have begun it."""
    other = after(begin(2, "T"), both(Seen(OLD, None, "X")))
    refused = after(after(begin(2, "T"), both(Seen(OLD))), {0: Refusal("update_conflict", "X is open")})
    given_up_by_another = after(preparing(), {0: Seen(OLD, Change("T", "aborted")), 1: Silence()})
    unheard = given_up(after(after(begin(2, "T"), both(Seen(OLD))), {0: Silence()}), "no answer")
    found = [(one.opened, one.failure.code) for one in (other, refused, given_up_by_another, unheard) if one.failure]
    conflict = "update_conflict"
    assert found == [(False, conflict), (False, conflict), (True, conflict), (True, "daemon_not_ready")]


def test_it_is_said_when_nobody_knows_whether_it_was_committed() -> None:
    course = preparing(Change("T", "prepared", new()), Change("T", "prepared", new()))
    lost = given_up(after(course, {0: Silence()}), "no answer")
    assert (lost.phase, lost.outcome) == (Phase.DONE, None)
    assert lost.failure is not None
    assert lost.failure.code == "decision_unknown"
    left = after(end(2, forced=True), both(Seen(OLD, Change("X", "prepared", new()), "X")))
    assert not left.asked
    lost = given_up(after(after(left, {0: Decision("X", Outcome.OPEN)}), {0: Silence()}), "no answer")
    assert lost.failure is not None
    assert (lost.asked, lost.failure.code) == (True, "decision_unknown")


def test_a_refused_commit_is_looked_up() -> None:
    course = preparing(Change("T", "prepared", new()), Change("T", "prepared", new()))
    course = after(course, {0: Refusal("update_conflict", "decided")})
    assert [one.verb for one in asks(course)] == [Verb.READ]
    aborted = after(course, {0: Decision("T", Outcome.ABORTED)})
    assert aborted.failure is not None
    assert aborted.failure.code == "update_conflict"
    assert {one.verb for one in asks(aborted)} == {Verb.RESOLVE}
    superseded = after(course, {0: Decision("T", Outcome.SUPERSEDED, new().versions)})
    assert superseded.failure is None, "committed, and another since"


def test_ranks_that_differ_are_changed_by_request_only() -> None:
    seen: dict[int, Answer] = {0: Seen(OLD), 1: Seen(new())}
    refused = after(begin(2, "T"), seen)
    assert refused.failure is not None
    assert (asks(refused), refused.failure.code) == ((), "ranks_disagree")
    assert [one.verb for one in asks(after(begin(2, "T", mixed=True), seen))] == [Verb.OPEN]


def test_what_is_open_is_anothers_unless_it_is_to_be_ended() -> None:
    seen: dict[int, Answer] = {0: Seen(OLD, None, "X"), 1: Seen(OLD)}
    polite = after(after(end(2, forced=False), seen), {0: Decision("X", Outcome.OPEN)})
    assert polite.failure is not None
    assert (asks(polite), polite.failure.code) == ((), "update_conflict")
    forced = after(after(end(2, forced=True), seen), {0: Decision("X", Outcome.OPEN)})
    assert [one.verb for one in asks(forced)] == [Verb.ABORT]


def test_what_is_open_is_given_up_by_who_has_a_change_of_his_own() -> None:
    """Every rank has it prepared: who only ends it commits it. What is committed already stays so."""
    seen = both(Seen(OLD, Change("X", "prepared", new()), "X"))
    for commits, verb in ((True, Verb.COMMIT), (False, Verb.ABORT)):
        course = after(end(2, forced=True, commits=commits), seen)
        assert [one.verb for one in asks(after(course, {0: Decision("X", Outcome.OPEN)}))] == [verb]
        read = after(course, {0: Decision("X", Outcome.COMMITTED, new().versions)})
        assert ({one.verb for one in asks(read)}, read.outcome) == ({Verb.RESOLVE}, Outcome.COMMITTED)


def test_a_silent_rank_keeps_nothing_from_being_ended_but_from_being_committed() -> None:
    seen: dict[int, Answer] = {0: Seen(OLD, Change("X", "prepared", new()), "X"), 1: Silence()}
    course = after(after(end(2, forced=True), seen), {0: Decision("X", Outcome.OPEN)})
    assert [one.verb for one in asks(course)] == [Verb.ABORT]
    done = after(after(course, {0: Decision("X", Outcome.ABORTED)}), {0: Seen(OLD), 1: Silence()})
    assert (done.phase, done.away) == (Phase.DONE, frozenset({1}))


def test_what_every_rank_serves_already_is_given_up_and_no_failure() -> None:
    course = preparing(Change("T", "prepared", OLD), Change("T", "preparing"))
    course = after(course, {1: Seen(OLD, Change("T", "prepared", OLD))})
    assert [one.verb for one in asks(course)] == [Verb.ABORT]
    told = after(course, {0: Decision("T", Outcome.ABORTED)})
    assert {one.verb for one in asks(told)} == {Verb.RESOLVE}
    done = after(told, both(Seen(OLD, Change("T", "aborted", OLD))))
    assert (done.phase, done.unchanged, done.failure, done.away) == (Phase.DONE, True, None, frozenset())


def test_what_one_rank_serves_already_and_another_has_loaded_anew_is_committed() -> None:
    again = Held("g3", OLD.versions)
    course = preparing(Change("T", "prepared", OLD), Change("T", "prepared", again))
    assert [one.verb for one in asks(course)] == [Verb.COMMIT]


def test_what_is_served_already_stays_open_where_the_abort_has_no_answer() -> None:
    course = preparing(Change("T", "prepared", OLD), Change("T", "prepared", OLD))
    lost = given_up(after(course, {0: Silence()}), "no answer")
    assert lost.failure is not None
    assert (lost.phase, lost.outcome, lost.failure.code) == (Phase.DONE, None, "daemon_unreachable")
