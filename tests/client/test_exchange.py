"""The conversation of an attach with a daemon that follows a script: each answer, each silence, each broken frame."""

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightcached.client import WeightSet
from weightcached.client.exchange import refusal
from weightcached.protocol import errors
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import (
    CacheConfigMismatch,
    CheckpointUnproven,
    DaemonNotReady,
    DaemonUnreachable,
    ProtocolError,
    WeightCacheError,
)
from weightcached.protocol.messages import DifferingField, Hello, Loading, Refused, Unproven
from weightcached.protocol.places import Place
from weightcached.protocol.testing import (
    Close,
    Die,
    Drip,
    Gate,
    HonestGrant,
    LyingDaemon,
    Open,
    Receive,
    ReceiveToEnd,
    Repeat,
    Reset,
    Send,
    SendRaw,
    Stall,
    Step,
    frame,
    frame_lies,
)

Serve = Callable[..., AbstractContextManager[LyingDaemon]]
Attached = Callable[..., WeightSet]

LOADING = Loading(stage="read", bytes_done=1_000_000_000, bytes_total=4_000_000_000, bytes_per_s=1e9)


def test_the_hello_says_all_that_the_daemon_has_to_compare(
    grant: HonestGrant, config: CacheConfig, serve: Serve, attached: Attached
) -> None:
    with serve(grant.step()) as daemon, attached(engine_name="an engine", timeout_s=7):
        hello = daemon.wires[0].messages[0]
    assert isinstance(hello, Hello)
    assert (hello.name, hello.pid, hello.want, hello.digest) == ("an engine", os.getpid(), "checkpoint", None)
    assert hello.fingerprint == config.fingerprint
    assert hello.config["parallel.tp_rank"] == 0
    assert hello.receipts is not None
    assert 0 < hello.wait_s <= 7


def test_waiting_shows_progress_and_then_gives_the_weights(
    grant: HonestGrant, serve: Serve, attached: Attached, log: pytest.LogCaptureFixture
) -> None:
    seen: list[Loading] = []
    with serve(Send(LOADING), Send(LOADING), grant.step()), attached(progress=seen.append):
        assert seen == [LOADING, LOADING]
    assert len([record for record in log.records if "1.00 of 4.00 GB" in record.getMessage()]) == 1


def test_a_load_longer_than_the_deadline(serve: Serve, attached: Attached) -> None:
    started_s = time.monotonic()
    with serve(Repeat(Send(LOADING), every_s=0.02)), pytest.raises(DaemonNotReady, match=r"read, 1\.00 of 4\.00 GB"):
        attached(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 2


@pytest.mark.parametrize(
    "step",
    [
        Stall(),
        SendRaw(frame(LOADING)[:5]),  # and then nothing
        Drip(frame(LOADING), every_s=0.2),  # a byte now and then renews no deadline
    ],
)
def test_silence_ends_at_the_one_deadline(step: object, serve: Serve, attached: Attached) -> None:
    started_s = time.monotonic()
    with serve(step, Stall()), pytest.raises(DaemonNotReady, match="no answer at all"):
        attached(timeout_s=0.4)
    assert 0.4 <= time.monotonic() - started_s < 2


def test_a_dripped_grant_is_a_grant(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    data = frame(grant.message, fd_count=2)
    with serve(SendRaw(data[:1], grant.fds), Drip(data[1:], nbytes_each=97, every_s=0.001)), attached() as weights:
        weights.verify()


def test_frames_that_arrive_together_keep_their_descriptors_apart(
    grant: HonestGrant, serve: Serve, attached: Attached
) -> None:
    with serve(SendRaw(frame(LOADING) * 3), grant.step()), attached() as weights:
        weights.verify()


@pytest.mark.parametrize("lie", sorted(frame_lies(LOADING, pickle_target="x")))
def test_a_frame_that_lies(lie: str, serve: Serve, attached: Attached, tmp_path: Path) -> None:
    trap = tmp_path / "pickled"
    data = frame_lies(LOADING, pickle_target=str(trap))[lie]
    with serve(SendRaw(data)), pytest.raises((ProtocolError, errors.TransferError)):
        attached()
    assert not trap.exists()


@pytest.mark.parametrize("nbytes", [1, 8, 15, 16, 17, 40])
def test_a_frame_cut_off_is_a_broken_frame(nbytes: int, serve: Serve, attached: Attached) -> None:
    with serve(SendRaw(frame(LOADING)[:nbytes]), Close()), pytest.raises(ProtocolError, match="cut off"):
        attached()


def test_a_grant_cut_off_after_its_descriptors_arrived(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    data = frame(grant.message, fd_count=2)
    with serve(SendRaw(data[:40], grant.fds), Close()), pytest.raises(ProtocolError, match="cut off"):
        attached()


@pytest.mark.parametrize("end", [Close(), Die()])
def test_a_daemon_that_dies_before_it_answers_is_waited_for_until_the_deadline(
    end: object, serve: Serve, attached: Attached
) -> None:
    """Whether it dies with its listener, or the listener lives on, as in a vault: the attach had been connected."""
    started_s = time.monotonic()
    with serve(end), pytest.raises(DaemonUnreachable, match="died during the exchange, without an answer") as caught:
        attached(timeout_s=0.4)
    assert "times" in str(caught.value.found)
    assert "nobody else who answered before the deadline" in str(caught.value.found)
    assert 0.4 <= time.monotonic() - started_s < 2


def test_a_daemon_that_closes_without_reading(place: Place, attached: Attached) -> None:
    with LyingDaemon(place.socket_path, [Reset()]), pytest.raises(DaemonUnreachable, match="died during the exchange"):
        attached(timeout_s=0.4)


@pytest.mark.parametrize(
    "first",
    [
        [Receive(), Send(LOADING), Close()],  # died while it loaded
        [Receive(), Close()],  # died before it answered
        [Reset()],  # died before it even looked: what it had not read comes back as a reset
        [Close()],  # was never there: the connection had waited in the backlog of a listener that outlived it
    ],
)
def test_a_daemon_that_dies_during_the_exchange_is_waited_for(
    first: list[Step], grant: HonestGrant, place: Place, attached: Attached, log: pytest.LogCaptureFixture
) -> None:
    """As under whoever starts it again: an attach that had been connected goes on within its deadline."""
    second: list[Step] = [Receive(), Send(LOADING), grant.step(), ReceiveToEnd()]
    with LyingDaemon(place.socket_path, first, second), attached() as weights:
        weights.verify()
    assert any("waiting for the next one" in record.getMessage() for record in log.records)


def test_a_daemon_that_died_and_left_only_a_backlog(place: Place, attached: Attached) -> None:
    """What its listener's keeper holds open takes connections that nobody will ever look at."""
    with (
        LyingDaemon(place.socket_path, [Receive(), Send(LOADING), Close()], [Stall()]),
        pytest.raises(DaemonUnreachable, match=r"died during the exchange, at read"),
    ):
        attached(timeout_s=0.5)


def test_an_attach_that_has_not_been_connected_waits_for_nobody(serve: Serve, place: Place, attached: Attached) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.socket_path))
    started_s = time.monotonic()
    with pytest.raises(DaemonUnreachable, match="without having been connected before"):
        attached(timeout_s=30)
    assert time.monotonic() - started_s < 5


def test_a_daemon_that_died_while_it_loaded_and_does_not_come_back(serve: Serve, attached: Attached) -> None:
    started_s = time.monotonic()
    with serve(Send(LOADING), Die()), pytest.raises(DaemonUnreachable, match=r"died during the exchange, at read"):
        attached(timeout_s=0.5)
    assert 0.5 <= time.monotonic() - started_s < 2


def test_a_daemon_that_answered_once_and_then_hangs_up_on_everybody(place: Place, attached: Attached) -> None:
    started_s = time.monotonic()
    daemon = LyingDaemon(place.socket_path, [Receive(), Send(LOADING), Close()], [Receive(), Close()])
    with daemon, pytest.raises(DaemonUnreachable, match=r"died during the exchange, at read"):
        attached(timeout_s=0.4)
    assert 0.4 <= time.monotonic() - started_s < 2
    assert len(daemon.wires) < 12


def test_the_next_daemon_may_still_be_loading_at_the_deadline(place: Place, attached: Attached) -> None:
    with (
        LyingDaemon(place.socket_path, [Receive(), Close()], [Receive(), Repeat(Send(LOADING), every_s=0.02)]),
        pytest.raises(DaemonNotReady, match=r"read, 1\.00 of 4\.00 GB"),
    ):
        attached(timeout_s=0.5)


def test_unproven_is_answered_with_the_digest(
    grant: HonestGrant, serve: Serve, attached: Attached, tmp_path: Path
) -> None:
    unproven = Unproven(reason="other receipts", rule="a rule")
    with serve(Send(unproven), Receive(), grant.step()) as daemon, attached(cache_dir=tmp_path / "digests"):
        first, second = daemon.wires[0].messages[:2]
    assert isinstance(first, Hello)
    assert isinstance(second, Hello)
    assert first.digest is None
    assert second.digest is not None
    assert second.receipts == first.receipts


def test_a_daemons_words_play_no_tricks_on_whoever_reads_our_log(
    grant: HonestGrant, serve: Serve, attached: Attached, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    tricks = "\x1b[2J\x1b]0;owned\x07\nWARNING forged"
    loading = LOADING.model_copy(update={"stage": tricks})
    unproven = Unproven(reason=tricks, rule=tricks)
    provenance = grant.message.provenance.model_copy(update={"path": tricks, "host": tricks, "revision": tricks})
    theirs = dataclasses.replace(grant, message=grant.message.model_copy(update={"provenance": provenance}))
    steps = [Send(loading), Send(loading.model_copy(update={"bytes_total": 0})), Send(unproven), Receive()]
    with serve(*steps, theirs.step()), attached(cache_dir=tmp_path / "digests"):
        pass
    refused = Refused(code="daemon_failed", message=tricks, found=tricks, next_step=tricks)
    with serve(Send(refused)), pytest.raises(errors.DaemonFailed) as caught:
        attached()
    said = [record.getMessage() for record in log.records] + [str(caught.value)]
    assert sum("owned" in line for line in said) == 5
    assert all(line.isprintable() for line in said)


def test_a_digest_that_proves_nothing_either(serve: Serve, attached: Attached, tmp_path: Path) -> None:
    unproven = Unproven(reason="other receipts", rule="a rule")
    words = r"other receipts \(rule: a rule\)"
    with serve(Send(unproven), Receive(), Send(unproven)), pytest.raises(CheckpointUnproven, match=words):
        attached(cache_dir=tmp_path / "digests")
    with serve(Send(unproven)), pytest.raises(CheckpointUnproven, match="other receipts"):
        attached(digest="a" * 64)


def test_the_deadline_also_bounds_the_digest(serve: Serve, attached: Attached, tmp_path: Path) -> None:
    with serve(Send(Unproven(reason="r", rule="r"))), pytest.raises(CheckpointUnproven, match="before the deadline"):
        attached(cache_dir=tmp_path / "digests", timeout_s=0.05)


@pytest.mark.parametrize("code", sorted(set(errors.ERRORS_BY_CODE) - {CacheConfigMismatch.code}))
def test_each_refusal_is_the_error_of_its_code(
    code: str, config: CacheConfig, serve: Serve, attached: Attached
) -> None:
    refused = Refused(code=code, message="no", expected="this", found="that", where="there", next_step="do so")
    with serve(Send(refused)), pytest.raises(WeightCacheError) as caught:
        attached()
    error = caught.value
    assert type(error) is errors.ERRORS_BY_CODE[code]
    assert (error.message, error.expected, error.found, error.where, error.next_step) == (
        "no",
        "this",
        "that",
        "there",
        "do so",
    )


def test_a_refusal_is_never_taken_for_an_absent_daemon(grant: HonestGrant, serve: Serve, attached: Attached) -> None:
    """A daemon that says "absent" does not make the engine load from disk: only the path can be absent."""
    with serve(Send(Refused(code="daemon_absent", message="nobody home"))), pytest.raises(errors.DaemonAbsent):
        attached(mode="client")


def test_last_words_are_heard_although_the_hello_cannot_be_sent(place: Place, attached: Attached) -> None:
    """A daemon that does not serve this user says so, without waiting to be asked, and closes."""
    refused = Refused(code="untrusted_client", message="not you")
    with LyingDaemon(place.socket_path, [Send(refused), Close()]), pytest.raises(errors.UntrustedClient, match="you"):
        attached()


def test_a_refusal_with_an_unknown_code(serve: Serve, attached: Attached) -> None:
    with serve(Send(Refused(code="from_the_future", message="words"))), pytest.raises(ProtocolError, match="words"):
        attached()


def test_a_config_mismatch_names_every_leaf_with_both_values(
    config: CacheConfig, serve: Serve, attached: Attached
) -> None:
    refused = Refused(
        code=CacheConfigMismatch.code,
        message="the daemon caches another configuration",
        fields=(
            DifferingField(name="parallel.tp_rank", present=True, value=1),
            DifferingField(name="model.rope_scaling", present=True, value={"factor": 8.0, "rope_type": "llama3"}),
            DifferingField(name="model.hidden_size", present=False, value=None),
        ),
    )
    with serve(Send(refused)), pytest.raises(CacheConfigMismatch) as caught:
        attached()
    fields = {difference.field: (difference.daemon, difference.client) for difference in caught.value.fields}
    assert fields["parallel.tp_rank"] == (1, 0)
    assert fields["model.hidden_size"] == (errors.ABSENT, config.model["hidden_size"])
    assert any(name.startswith("model.rope_scaling") for name in fields)
    assert "parallel.tp_rank" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    code=st.sampled_from([*errors.ERRORS_BY_CODE, "unheard_of"]) | st.text(max_size=30),
    texts=st.lists(st.none() | st.text(max_size=50), min_size=4, max_size=4),
    fields=st.dictionaries(
        st.sampled_from(["layout", "dtype", "parallel.tp_size", "model.vocab_size", "nothing"]) | st.text(max_size=20),
        st.tuples(st.booleans(), JSON),
        max_size=5,
    ),
)
def test_whatever_a_refusal_holds_becomes_one_error_that_can_be_printed(
    config: CacheConfig, code: str, texts: list[str | None], fields: dict[str, tuple[bool, Any]]
) -> None:
    refused = Refused(
        code=code,
        message="m",
        expected=texts[0],
        found=texts[1],
        where=texts[2],
        next_step=texts[3],
        fields=tuple(DifferingField(name=n, present=p, value=v) for n, (p, v) in fields.items()),
    )
    error = refusal(refused, config, "here")
    assert isinstance(error, WeightCacheError)
    assert str(error)


def test_a_progress_callback_that_raises_ends_the_attach(serve: Serve, attached: Attached) -> None:
    def give_up(_: Loading) -> None:
        raise RuntimeError("enough")

    gate = Gate()
    with serve(Send(LOADING), ReceiveToEnd(), Open(gate)):
        with pytest.raises(RuntimeError, match="enough"):
            attached(progress=give_up)
        gate.wait()
