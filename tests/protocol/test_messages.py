"""Messages: closed, frozen and strict; what each field may hold, at its limits; which way each may travel."""

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from weightcached.protocol import control, messages, push_messages, worker_messages
from weightcached.protocol.config import Provenance
from weightcached.protocol.control import CONTROL_ANSWERS, CONTROL_EVENTS, CONTROL_REQUESTS
from weightcached.protocol.messages import (
    CLIENT_TO_DAEMON,
    DAEMON_TO_CLIENT,
    GRANT_SEGMENTS_MAX,
    AccountingCounts,
    Dialect,
    Grant,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Resume,
    SegmentInfo,
    Status,
)
from weightcached.protocol.push_messages import TRAINER_TO_WORKER, WORKER_TO_TRAINER
from weightcached.protocol.worker_messages import KEEPER_TO_WORKER, WORKER_TO_KEEPER

PLANES = (
    (CLIENT_TO_DAEMON, DAEMON_TO_CLIENT),
    (KEEPER_TO_WORKER, WORKER_TO_KEEPER),
    (TRAINER_TO_WORKER, WORKER_TO_TRAINER),
    (CONTROL_REQUESTS, CONTROL_ANSWERS, CONTROL_EVENTS),
)
DIALECTS = [dialect for plane in PLANES for dialect in plane]
KINDS = sorted({kind for dialect in DIALECTS for kind in dialect.types.values()}, key=str)
PARTS = {
    AccountingCounts,
    SegmentInfo,
    control.ChangeInfo,
    control.FromCheckpoint,
    control.FromHeld,
    control.FromTrainer,
    control.RankInfo,
    messages.DifferingField,
    messages.Durations,
    messages.GenerationInfo,
    messages.LeaseInfo,
    push_messages.Piece,
    push_messages.PushedBox,
    push_messages.WantedTensor,
    worker_messages.Push,
}
"""What travels only within another message."""

HELLO: dict[str, Any] = {
    "client_version": "0.1.0",
    "name": "engine",
    "pid": 1,
    "config": {"dtype": "auto", "model.layers": [1, 2.5, None, {"a": True}]},
    "fingerprint": "0" * 64,
    "receipts": None,
    "receipts_trusted": False,
    "digest": None,
    "want": "checkpoint",
    "wait_s": 1.5,
}
GRANT: dict[str, Any] = {
    "generation": "a" * 32,
    "version": "digest:0",
    "receipts_version": "receipts:0",
    "nonce": "b" * 32,
    "manifest_sha256": "c" * 64,
    "manifest_nbytes": 100,
    "segments": [{"memory": "host", "nbytes": 0}],
    "resident_nbytes": 100,
    "accounting": {"expected": 1, "loaded": 1, "ignored": 0, "unexpected": 0},
    "digest": None,
    "provenance": {"path": "/x", "host": "h", "revision": None, "tokenizer_sha256": None},
}


def test_plain_values_make_messages() -> None:
    assert Hello.model_validate(HELLO).config == HELLO["config"]
    grant = Grant.model_validate(GRANT)
    assert grant.segments == (SegmentInfo(memory="host", nbytes=0),)
    assert grant.accounting == AccountingCounts(expected=1, loaded=1, ignored=0, unexpected=0)
    assert grant.provenance == Provenance(path="/x", host="h")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_refuses_fields_it_does_not_know(kind: type[Message]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"surprise": 1})
    assert ("surprise",) in [error["loc"] for error in raised.value.errors() if error["type"] == "extra_forbidden"]


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Ping(token=1).token = 2


def allowed(kind: type[Message], honest: dict[str, Any], field: str, value: object) -> bool:
    try:
        kind.model_validate({**honest, field: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("pid", [0, 2**63 - 1], [-1, 2**63, 1.0, "1", True, None]),
        ("name", ["", "x" * 1024], ["x" * 1025, b"x", 1, None]),
        ("fingerprint", ["f" * 64], ["f" * 63, "f" * 65, "F" * 64, "g" * 64, "f" * 64 + "\n", b"f" * 64, None]),
        ("receipts", [None, "0" * 64], ["", "0" * 32, 0]),
        ("receipts_trusted", [True, False], [0, 1, "yes", None]),
        ("wait_s", [0, 0.0, 86400.0], [-1.0, 86401.0, float("nan"), float("inf"), "1", None, True]),
        (
            "config",
            [{}, {"a": None, "b": [[1], {"c": 1.5}]}, {"x" * 1024: 1}],
            [None, [], {"a": b"x"}, {"a": {b"k": 1}}, {"a": {1: 2}}, {b"a": 1}, {"x" * 1025: 1}, {"a": {1, 2}}],
        ),
    ],
)
def test_what_the_fields_of_a_hello_may_hold(field: str, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not allowed(Hello, HELLO, field, value)] == []
    assert [value for value in bad if allowed(Hello, HELLO, field, value)] == []


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("generation", ["0" * 32], ["0" * 64, "", None]),
        ("segments", [[], GRANT["segments"] * GRANT_SEGMENTS_MAX], [GRANT["segments"] * (GRANT_SEGMENTS_MAX + 1), {}]),
        ("segments", [], [[{"memory": "disk", "nbytes": 1}], [{"memory": "host", "nbytes": -1}], [{}], ["host"]]),
        ("accounting", [], [{}, None, {**GRANT["accounting"], "more": 1}]),
        ("provenance", [], [{}, {**GRANT["provenance"], "path": "x" * 4097}, {**GRANT["provenance"], "code": "x"}]),
    ],
)
def test_what_the_fields_of_a_grant_may_hold(field: str, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not allowed(Grant, GRANT, field, value)] == []
    assert [value for value in bad if allowed(Grant, GRANT, field, value)] == []


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("generation", ["0" * 32], ["0" * 31, "0" * 64, "", None]),
        ("manifest_sha256", ["f" * 64], ["f" * 32, "F" * 64, None]),
        ("disk_fallbacks", [0, 7], [-1, None, 1.0, True]),
        ("pid", [0], [-1, None]),
    ],
)
def test_what_the_fields_of_a_resume_may_hold(field: str, good: list[object], bad: list[object]) -> None:
    honest = {"client_version": "0", "name": "e", "pid": 1, "generation": "a" * 32, "manifest_sha256": "c" * 64}
    assert [value for value in good if not allowed(Resume, honest, field, value)] == []
    assert [value for value in bad if allowed(Resume, honest, field, value)] == []


def test_a_refusal_needs_a_code_and_a_message_and_its_texts_are_limited() -> None:
    refusal = {"code": "daemon_failed", "message": "x"}
    assert Refused.model_validate(refusal).fields == ()
    assert not allowed(Refused, {"code": "x"}, "next_step", "y")
    assert allowed(Refused, refusal, "message", "x" * 32 * 1024)
    assert not allowed(Refused, refusal, "message", "x" * (32 * 1024 + 1))
    field = {"name": "dtype", "present": True, "value": {"deep": [1]}}
    assert allowed(Refused, refusal, "fields", [field])
    assert not allowed(Refused, refusal, "fields", [{**field, "value": b"bytes"}])


def test_a_value_nested_too_deeply_is_refused() -> None:
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    assert not allowed(Hello, HELLO, "config", {"a": nested})


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_dialect_numbers_its_own_messages_and_no_others(dialect: Dialect) -> None:
    for number, kind in dialect.types.items():
        assert 0 < number < 2**16
        assert dialect.number_of(kind.model_construct()) == number
    foreign: Message = Pong(token=1) if dialect is not DAEMON_TO_CLIENT else Status()
    with pytest.raises(ValueError, match="does not travel"):
        dialect.number_of(foreign)


@pytest.mark.parametrize("plane", PLANES, ids=lambda plane: plane[0].name)
def test_directions_share_neither_numbers_nor_messages(plane: tuple[Dialect, ...]) -> None:
    """A frame that is reflected to its sender must not be taken for an answer."""
    for one, other in itertools.combinations(plane, 2):
        assert not one.types.keys() & other.types.keys()
        assert not set(one.types.values()) & set(other.types.values())


def test_the_limits_are_those_of_the_design() -> None:
    assert (CLIENT_TO_DAEMON.body_max_bytes, CLIENT_TO_DAEMON.fds_max) == (64 * 1024, 0)
    assert (DAEMON_TO_CLIENT.body_max_bytes, DAEMON_TO_CLIENT.fds_max) == (1024 * 1024, 64)


def test_a_grant_of_all_segments_has_room_for_their_descriptors_the_manifest_and_their_process() -> None:
    assert DAEMON_TO_CLIENT.fds_max == GRANT_SEGMENTS_MAX + 2


def test_only_the_data_plane_and_the_worker_are_handed_descriptors() -> None:
    assert [dialect.name for dialect in DIALECTS if dialect.fds_max] == [
        DAEMON_TO_CLIENT.name,
        KEEPER_TO_WORKER.name,
        WORKER_TO_KEEPER.name,
    ]


def test_every_message_travels_or_is_part_of_one_that_does() -> None:
    defined = {
        value
        for module in (control, messages, push_messages, worker_messages)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value.__module__ == module.__name__
    }
    assert sorted(defined - PARTS - {Message}, key=str) == KINDS
