"""Update, rollback, and what is held, over two real ranks: all change or none does, and a refusal says who and why."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import memory_limit
from tests.support.checkpoints import settled, tiny_llama
from tests.support.commanding import Changer, from_directory, other_weights, standings
from tests.support.daemons import REAL, TIMEOUT_S, Daemon, ask, scripted_daemon
from tests.support.eventually import eventually
from tests.support.groups import Change, group, versions, waiting
from tests.support.racing import race
from tests.support.unprivileged import ROOT
from weightcached.client import attach
from weightcached.client.control import (
    changes,
    commands,
    coordinator,
    drop,
    generations,
    held_commands,
    pin,
    resolve,
    rollback,
    update,
)
from weightcached.client.control import group as group_module
from weightcached.client.control.coordinator import Step
from weightcached.client.control.course import Phase
from weightcached.client.control.group import Where
from weightcached.daemon.output import UNREAD_EXIT, UNWRITTEN_EXIT
from weightcached.protocol.content import open_weights, take_receipts, weight_files
from weightcached.protocol.control import FromHeld, Pin, Prepare, RankState
from weightcached.protocol.digest_cache import DigestCache
from weightcached.protocol.errors import (
    CheckpointMismatch,
    ConfigurationError,
    DaemonAbsent,
    DaemonDraining,
    DaemonNotReady,
    GenerationGone,
    InsufficientMemory,
    InvalidOption,
    TransferError,
    UpdateConflict,
    WeightCacheError,
    WorkerDied,
)
from weightcached.protocol.messages import Release, Released
from weightcached.protocol.places import Place

_NUMBERS = count(2)


@pytest.fixture(scope="module")
def ranks(settled_model: Path) -> Iterator[list[Daemon]]:
    """Two ranks that the tests of this module share; each leaves nothing open and nothing prepared."""
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        group(settled_model, Path(name) / "run") as both,
    ):
        yield both


@pytest.fixture
def at(ranks: list[Daemon]) -> Iterator[Path]:
    """Their runtime directory. What a test leaves under way fails it."""
    at = ranks[0].place.runtime_dir
    yield at
    if left := waiting(ranks):
        resolve(runtime_dir=at)
    assert left == []
    assert len(set(versions(ranks))) == 1


@pytest.fixture
def newer(settled_model: Path, tmp_path: Path) -> Path:
    """Weights that nobody has loaded yet."""
    return other_weights(settled_model, tmp_path / "newer", number=next(_NUMBERS))


def test_updated_and_rolled_back_on_both_ranks(ranks: list[Daemon], at: Path, newer: Path) -> None:
    first = versions(ranks)
    changed = update(newer, runtime_dir=at)
    assert changed.away == ()
    second = versions(ranks)
    assert second != first
    rollback(runtime_dir=at)
    assert versions(ranks) == first
    rollback(second[0].partition(":")[2][:16], runtime_dir=at)  # the beginning of what the ranks compared at first
    assert versions(ranks) == second
    with pytest.raises(GenerationGone, match="no such version"):
        rollback("receipts:" + "0" * 64, runtime_dir=at)


def test_a_rank_that_does_not_know_a_content_digest_yet_is_rolled_back_and_does_not_call_the_version_gone(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """Rank 0 names the version by its digest, which rank 1 does not come to know as long as somebody else computes it:
    to a coordinator, and then to an engine.
    """
    with open_weights(weight_files(settled_model)) as weights:
        receipts = take_receipts(weights).sha256
    shard: dict[str, Any] = {"layout": "fused", "tp_size": 2}
    own_cache = ["--cache-dir", str(tmp_path / "digests")]
    with DigestCache(tmp_path / "digests").opened([]) as shelf, ExitStack() as turn:
        turn.enter_context(shelf.turn(receipts))
        with (
            scripted_daemon(settled_model, runtime_dir, **shard, tp_rank=0) as knowing,
            scripted_daemon(settled_model, runtime_dir, *own_cache, **shard, tp_rank=1) as waits,
        ):
            for one in (knowing, waits):
                one.wait_until("ready")
            eventually(lambda: knowing.report().digest is not None)
            before = versions([knowing, waits])
            update(newer, runtime_dir=runtime_dir)
            rollback(runtime_dir=runtime_dir)
            assert versions([knowing, waits]) == before
            assert waits.report().digest is None
            named = knowing.report().version
            asked: dict[str, Any] = {**shard, "runtime_dir": runtime_dir, "mode": "require", "want": "current"}
            with attach(settled_model, **asked, tp_rank=1) as weights:
                with pytest.raises(DaemonNotReady, match=r"digest.*ask again"):
                    weights.stage(version=named)
                turn.close()
                eventually(lambda: waits.report().digest is not None)
                with weights.stage(version=named) as staged:
                    assert staged.generation == weights.generation


def test_engines_of_both_ranks_get_the_version_of_rank_0(ranks: list[Daemon], at: Path, newer: Path) -> None:
    change = Change(ranks, from_directory(newer))
    change.open()
    change.prepare()
    change.prepared()
    prepared = [state.generations[-1] for state in (one.state() for one in change.ranks)]
    assert {one.standing for one in prepared} == {"prepared"}
    shard: dict[str, Any] = {"layout": "fused", "tp_size": 2, "runtime_dir": at, "mode": "require"}
    with (
        pytest.raises((DaemonNotReady, CheckpointMismatch)),  # nobody has decided for it
        attach(newer, **shard, tp_rank=0, want=prepared[0].version, timeout_s=1),
    ):
        pass
    assert change.commit().outcome == "committed"  # and rank 1 may not know yet
    with attach(newer, **shard, tp_rank=0, want="current", timeout_s=30) as mine:
        wanted = mine.version
        with attach(newer, **shard, tp_rank=1, want=wanted, timeout_s=30) as others:
            assert (mine.version, others.version) == (wanted, wanted)
            assert {one.generation for one in (mine, others)} == {one.generation for one in prepared}
            change.resolve()


def test_a_change_that_is_under_way_is_left_alone_or_ended_by_command(
    ranks: list[Daemon], at: Path, newer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = versions(ranks)
    other = Change(ranks, from_directory(newer))
    other.open()
    other.prepare(0)
    with pytest.raises(UpdateConflict, match=r"under way.*--resolve"):
        update(newer, runtime_dir=at)
    with pytest.raises(UpdateConflict):
        rollback(first[0], runtime_dir=at)
    assert versions(ranks) == first
    arguments = ["--runtime-dir", str(at)]
    assert commands.update_main(["--model", str(newer), *arguments]) == commands.NOT_NOW_EXIT
    assert commands.update_main(["--model", str(newer), "--resolve", *arguments]) == commands.DONE_EXIT
    assert "served by every rank" in capsys.readouterr().out
    assert versions(ranks) != first
    assert other.ranks[0].decide(other.transaction, commit=False).outcome == "aborted"


def test_a_rollback_that_was_left_open_is_in_the_way_of_another_and_no_more(
    ranks: list[Daemon], at: Path, newer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it was for is held, and is what the next one means, too."""
    first = versions(ranks)
    update(newer, runtime_dir=at)
    left = Change(ranks, FromHeld(version=first[0]))
    left.open()
    left.prepare()
    left.prepared()
    arguments = ["--runtime-dir", str(at)]
    for words in ([], ["--to", first[0]], ["--wait", "--timeout", "1"]):
        assert commands.rollback_main([*words, *arguments]) == commands.NOT_NOW_EXIT
        said = capsys.readouterr().err
        assert f"another change is under way: {left.transaction}" in said
        assert "`weightcached update --resolve` ends it" in said
    steps: queue.Queue[Step] = queue.Queue()
    where = Where.of(runtime_dir=at, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(lambda: asyncio.run(changes.rollback(where, wait=True, told=steps.put)))
        while steps.get(timeout=TIMEOUT_S).transaction != left.transaction:
            pass
        left.commit()
        assert waits.result(TIMEOUT_S).already, "it means what was before when it was asked for, whoever brings it back"
        assert versions(ranks) == first
    again = Change(ranks, FromHeld(version=rollback(runtime_dir=at).before))
    again.open()
    again.prepare()
    again.prepared()
    assert commands.rollback_main(["--resolve", *arguments]) == commands.DONE_EXIT
    assert versions(ranks) == first


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_a_rollback_that_waited_takes_back_what_was_served_when_it_was_asked_for(
    ranks: list[Daemon], at: Path, newer: Path, settled_model: Path, tmp_path: Path, commit: bool, named: bool
) -> None:
    """Not what the other change has put in its place meanwhile. Whoever names a version gets it whatever came."""
    first = versions(ranks)
    update(newer, runtime_dir=at, keep=2)
    second = versions(ranks)
    other = Change(ranks, from_directory(other_weights(settled_model, tmp_path / "third", number=next(_NUMBERS))))
    other.open()
    other.prepare()
    other.prepared()
    steps: queue.Queue[Step] = queue.Queue()
    where = Where.of(runtime_dir=at, timeout_s=TIMEOUT_S)
    to = second[0] if named and commit else first[0] if named else None
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(lambda: asyncio.run(changes.rollback(where, to, wait=True, told=steps.put)))
        while steps.get(timeout=TIMEOUT_S).transaction != other.transaction:
            pass
        _ = other.commit() if commit else other.abort()
        if commit and not named:
            with pytest.raises(GenerationGone, match=r"was to be taken back is not served any more.*--to"):
                waits.result(TIMEOUT_S)
            assert second != versions(ranks) != first
        else:
            assert not waits.result(TIMEOUT_S).already
            assert versions(ranks) == (second if commit else first)


def test_what_was_left_is_given_up_by_who_changes_the_weights_himself(
    ranks: list[Daemon], at: Path, newer: Path, settled_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank has it prepared. Committed, it would be served where the change that follows fails, and would cost
    what can be rolled back to.
    """
    update(other_weights(settled_model, tmp_path / "orphan", number=next(_NUMBERS)), runtime_dir=at)
    earlier = versions(ranks)
    update(newer, runtime_dir=at, keep=1)
    served = [standings(Changer(one).state()) for one in ranks]

    def leave() -> None:
        left = Change(ranks, from_directory(tmp_path / "left"))
        left.open()
        left.prepare()
        left.prepared()

    other_weights(settled_model, tmp_path / "left", number=next(_NUMBERS))
    wider = tiny_llama(tmp_path / "wider", intermediate_size=64)
    arguments = ["--resolve", "--runtime-dir", str(at)]
    leave()
    assert commands.update_main(["--model", str(wider), *arguments]) == commands.FAILED_EXIT
    assert [standings(Changer(one).state()) for one in ranks] == served
    leave()
    assert commands.rollback_main(arguments) == commands.DONE_EXIT
    assert versions(ranks) == earlier


def test_a_change_whose_coordinator_meets_an_error_is_given_up(ranks: list[Daemon], at: Path, newer: Path) -> None:
    """The error is nobody's who has a part in the protocol: whoever watches raises it."""

    def watches(step: Step) -> None:
        if step.phase is Phase.WAIT:
            raise ZeroDivisionError

    where = Where.of(runtime_dir=at)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(changes.update(where, newer, told=watches))
    update(newer, runtime_dir=at)  # nothing of it is in the way


@pytest.mark.parametrize("keep", [-1, 64])
def test_a_number_to_keep_that_no_rank_would_take_is_refused_before_anything_is_open(
    ranks: list[Daemon], at: Path, newer: Path, keep: int
) -> None:
    with pytest.raises(InvalidOption, match=r"earlier generations.*0 to 63"):
        update(newer, runtime_dir=at, keep=keep)
    assert waiting(ranks) == []


def test_what_every_rank_has_prepared_is_committed_by_whoever_comes_next(
    ranks: list[Daemon], at: Path, newer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = versions(ranks)
    change = Change(ranks, from_directory(newer))
    change.open()
    change.prepare()
    change.prepared()
    assert versions(ranks) == first
    assert commands.update_main(["--resolve", "--runtime-dir", str(at)]) == commands.DONE_EXIT
    assert "what was left is committed" in capsys.readouterr().out
    assert versions(ranks) != first
    assert change.commit().outcome == "committed"  # asked again, it is what it was


def test_what_one_rank_has_not_is_given_up(ranks: list[Daemon], at: Path, newer: Path) -> None:
    first = versions(ranks)
    change = Change(ranks, from_directory(newer))
    change.open()
    change.prepare(1)
    change.prepared(1)
    resolve(runtime_dir=at)
    assert versions(ranks) == first
    with pytest.raises(UpdateConflict):
        change.commit()


def test_a_late_command_of_a_change_that_was_rolled_back_changes_nothing(
    ranks: list[Daemon], at: Path, newer: Path
) -> None:
    change = Change(ranks, from_directory(newer))
    change.open()
    change.prepare()
    change.prepared()
    change.commit()
    change.resolve()
    rollback(runtime_dir=at)
    back = versions(ranks)
    change.prepare(1)  # it serves what this change was for again
    change.ranks[1].ended(change.transaction)
    resolve(runtime_dir=at)
    assert versions(ranks) == back
    with pytest.raises(UpdateConflict):
        change.prepare(0)


@pytest.mark.parametrize("options", [{}, {"wait": True}, {"force": True}], ids=str)
def test_two_coordinators_at_once(
    ranks: list[Daemon], at: Path, settled_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Updates to different models, and an update and a rollback, one a little after the other: whatever each of them is
    told is true, and what the last one was told that it had done is what is served. One of each pair has ``options``.
    """
    chance = random.Random(7)

    def updating(**given: Any) -> str:
        newer = other_weights(settled_model, tmp_path / str(number := next(_NUMBERS)), number=number)
        return update(newer, runtime_dir=at, **given).version

    def rolling_back() -> str:
        return rollback(runtime_dir=at, **options).version

    began_s = time.monotonic()
    updating()
    takes_s = time.monotonic() - began_s
    seconds: list[Callable[[], str]] = [partial(updating, **options), rolling_back]
    for second in seconds * 3:
        delays_s = chance.sample([0.0, chance.choice([0.0, chance.uniform(0, takes_s)])], 2)
        first_end, second_end = race(ranks, [updating, second], delays_s, may_end_others="force" in options)
        assert isinstance(first_end, str) or isinstance(second_end, str), "one of two at the least"
        if "wait" in options:
            assert isinstance(second_end, str | GenerationGone), "what it was to roll back to may be gone by then"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("phase", "status"), [(Phase.WAIT, commands.NOT_NOW_EXIT), (Phase.COMMIT, commands.UNKNOWN_EXIT)]
)
def test_an_interruption_says_whether_anything_may_have_changed(
    ranks: list[Daemon],
    at: Path,
    newer: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    status: int,
    number: int,
) -> None:
    first = versions(ranks)

    class Interrupting(commands.Shown):
        def __call__(self, step: Step) -> None:
            super().__call__(step)
            if step.phase is phase:
                signal.raise_signal(number)

    monkeypatch.setattr(commands, "Shown", Interrupting)
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs this may have it ignored
    try:
        assert commands.update_main(["--model", str(newer), "--quiet", "--runtime-dir", str(at)]) == status
    finally:
        signal.signal(signal.SIGHUP, before)
    leader = generations(runtime_dir=at).leader.state
    assert leader is not None
    assert (leader.open is None) is (phase is Phase.WAIT)
    resolve(runtime_dir=at)  # the other rank would read the record by itself, later
    assert (versions(ranks) == first) is (phase is Phase.WAIT)


@pytest.mark.parametrize("interrupted", [True, False])
def test_giving_up_that_rank_0_does_not_confirm_says_that_the_change_may_still_be_open(
    ranks: list[Daemon],
    at: Path,
    newer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupted: bool,
) -> None:
    keeper = ranks[0].report().pid

    class Interrupting(commands.Shown):
        def __call__(self, step: Step) -> None:
            super().__call__(step)
            if step.phase is Phase.WAIT and not step.left:
                os.kill(keeper, signal.SIGSTOP)
                for _ in range(2 if interrupted else 0):  # whoever is impatient does not keep it from being asked
                    signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(commands, "Shown", Interrupting)
    monkeypatch.setattr(coordinator, "PATIENCE_S", 1.0)
    monkeypatch.setattr(coordinator, "GIVING_UP_S", 0.0)
    try:
        status = commands.update_main(["--model", str(newer), "--timeout", "4", "--runtime-dir", str(at)])
    finally:
        os.kill(keeper, signal.SIGCONT)
    said = capsys.readouterr().err.splitlines()[-1]
    expected = (4, "open; next step: `weightcached update --resolve`") if interrupted else (1, "--resolve` ends it): ")
    assert (status, "it may still be open" in said, expected[1] in said) == (expected[0], True, True), said
    resolve(runtime_dir=at)


def test_a_change_goes_on_when_a_terminal_that_it_does_not_need_is_closed(
    ranks: list[Daemon], at: Path, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``nohup``, which has SIGHUP ignored."""

    class HungUp(commands.Shown):
        def __call__(self, step: Step) -> None:
            super().__call__(step)
            signal.raise_signal(signal.SIGHUP)

    first = versions(ranks)
    monkeypatch.setattr(commands, "Shown", HungUp)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert commands.update_main(["--model", str(newer), "--quiet", "--runtime-dir", str(at)]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert versions(ranks) != first


def test_what_is_committed_names_who_was_seen_to_serve_it_and_who_was_not(
    ranks: list[Daemon], at: Path, newer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = ranks[1].report().pid

    class Stopping(commands.Shown):
        def __call__(self, step: Step) -> None:
            if step.phase is Phase.APPLY:
                os.kill(keeper, signal.SIGSTOP)

    monkeypatch.setattr(commands, "Shown", Stopping)
    monkeypatch.setattr(coordinator, "ANSWER_S", 1.0)
    try:
        status = commands.update_main(["--model", str(newer), "--runtime-dir", str(at)])
    finally:
        os.kill(keeper, signal.SIGCONT)
    out, errors = capsys.readouterr()
    assert status == commands.AWAY_EXIT
    assert "is committed, instead of " in out
    assert out.rstrip().endswith("; seen to serve it: tp0of2; not seen yet: tp1of2"), out
    assert errors.startswith("not seen to serve it yet: tp1of2; "), errors
    assert "every rank" not in out + errors
    eventually(lambda: len(set(versions(ranks))) == 1)  # by itself


def test_when_nobody_answers_once_it_is_decided_all_are_away_and_are_waited_for_where_that_is_asked(
    ranks: list[Daemon], at: Path, newer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keepers = [one.report().pid for one in ranks]
    find_group, unseen = group_module.find_group, count()

    def send(number: int) -> None:
        for keeper in keepers:
            os.kill(keeper, number)

    class Stopping(commands.Shown):
        def __call__(self, step: Step) -> None:
            if step.phase is Phase.APPLY:
                send(signal.SIGSTOP)

    async def until_unseen(*args: Any, **kwargs: Any) -> Any:
        try:
            return await find_group(*args, **kwargs)
        except WeightCacheError:
            next(unseen)
            send(signal.SIGCONT)
            raise

    monkeypatch.setattr(commands, "Shown", Stopping)
    monkeypatch.setattr(coordinator, "ANSWER_S", 1.0)
    monkeypatch.setattr(group_module, "ANSWER_S", 1.0)
    monkeypatch.setattr(group_module, "find_group", until_unseen)
    arguments = ["--runtime-dir", str(at)]
    first = versions(ranks)
    try:
        assert commands.update_main(["--model", str(newer), "--wait", *arguments]) == commands.DONE_EXIT
        assert next(unseen) >= 1, "nobody was seen meanwhile"
        left = Change(ranks, FromHeld(version=first[0]))
        left.open()
        left.prepare()
        left.prepared()
        assert commands.update_main(["--resolve", *arguments]) == commands.AWAY_EXIT
    finally:
        send(signal.SIGCONT)
    out, errors = capsys.readouterr()
    assert "what was left is committed: rank 0 does not answer now" in out
    assert errors.splitlines()[-1] == "no change is open; tp0of2, tp1of2 will read rank 0's record when back"
    eventually(lambda: versions(ranks) == first)  # by themselves


def test_a_change_goes_on_without_who_watches_it_and_lost_output_never_means_that_nothing_changed(
    ranks: list[Daemon], at: Path, newer: Path
) -> None:
    """As ``update 2>&1 | head``, with an output that is kept or not, and ``update >/dev/full``."""
    unread, unwritable = os.pipe()
    os.close(unread)
    full = os.open("/dev/full", os.O_WRONLY)
    command = partial(subprocess.run, cwd=ROOT, text=True, timeout=TIMEOUT_S)
    try:
        place = ["--runtime-dir", str(at)]
        before = versions(ranks)
        ended = command([*REAL, "update", "--model", str(newer), *place], stdout=subprocess.PIPE, stderr=unwritable)
        assert (ended.returncode, "is served by every rank" in ended.stdout) == (0, True)
        after = versions(ranks)
        assert after != before
        ended = command([*REAL, "rollback", *place], stdout=unwritable, stderr=unwritable)
        assert ended.returncode == UNREAD_EXIT
        assert versions(ranks) == before
        ended = command([*REAL, "rollback", "--to", after[0], *place], stdout=full, stderr=subprocess.PIPE)
        assert (ended.returncode, "all else is done, with status 0" in ended.stderr) == (UNWRITTEN_EXIT, True)
        assert versions(ranks) == after
        for words in (["generations"], ["events"], ["ctl", "status"], ["pin", after[0]], ["unpin", after[0]]):
            ended = command([*REAL, *words, *place], stdout=full, stderr=subprocess.PIPE)
            assert (ended.returncode, ended.stderr.count("\n")) == (UNWRITTEN_EXIT, 1), ended.stderr
    finally:
        os.close(unwritable)
        os.close(full)


def test_who_waits_for_anothers_change_says_for_which_once_and_has_changed_nothing_when_interrupted(
    ranks: list[Daemon], at: Path, newer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[str] = []

    class Interrupting(commands.Shown):
        def __call__(self, step: Step) -> None:
            super().__call__(step)
            waited.extend([step.waits_for] if step.waits_for else [])
            if len(waited) == 2 and step.phase is Phase.READ:  # it has looked again, and reads what is decided
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(commands, "Shown", Interrupting)
    other = Change(ranks, from_directory(newer))
    other.open()
    other.prepare()
    other.prepared()
    arguments = ["--model", str(newer), "--wait", "--runtime-dir", str(at)]
    assert commands.update_main(arguments) == commands.NOT_NOW_EXIT
    said = capsys.readouterr().err
    whose = f"somebody else's: transaction {other.transaction} (tp0of2 prepared, tp1of2 prepared)"
    assert (said.count(whose), said.count("somebody else's"), waited[0] in whose) == (1, 1, True)
    assert "interrupted: nothing that is served has changed" in said
    other.abort()
    other.resolve()


def test_an_update_to_what_is_served_leaves_what_can_be_rolled_back_to(
    ranks: list[Daemon], at: Path, newer: Path
) -> None:
    """As by a deployment that runs twice, right after the files were written: receipts prove nothing yet."""
    before = [one.state().current for one in map(Changer, ranks)]
    update(newer, runtime_dir=at)
    arguments = ["--runtime-dir", str(at)]
    assert commands.update_main(["--model", str(newer), *arguments]) == commands.DONE_EXIT
    rollback(runtime_dir=at)
    assert [one.state().current for one in map(Changer, ranks)] == before


def test_a_copy_of_what_is_served_leaves_what_can_be_rolled_back_to(ranks: list[Daemon], at: Path, newer: Path) -> None:
    """Other files, whose digest nobody knows yet: only by that they are seen to be the version that is served."""
    before = [one.state().current for one in map(Changer, ranks)]
    update(newer, runtime_dir=at)
    served = [Changer(one).current() for one in ranks]
    copy = shutil.copytree(newer, newer.with_name("copy"))
    changed = update(copy, runtime_dir=at)
    assert (changed.already, changed.away) == (False, ()), "where the files are now is known from then on"
    states = [Changer(one).state() for one in ranks]
    assert [one.current in served for one in states] == [False, False]
    assert {info.origin for one in states if (info := one.generation(one.current)) is not None} == {str(copy)}
    eventually(
        lambda: not any(one.state().generation(old) for one, old in zip(map(Changer, ranks), served, strict=True))
    )
    rollback(runtime_dir=at)
    assert [one.state().current for one in map(Changer, ranks)] == before


def workers(ranks: list[Daemon]) -> list[int]:
    """How many loads each rank has begun, and how many of them it has planned memory for."""
    counts = [sum(record.get("stage") == "start worker" for record in one.log.records()) for one in ranks]
    return counts + [sum(record.get("message") == "planned" for record in one.log.records()) for one in ranks]


def test_what_every_rank_serves_already_is_neither_loaded_nor_published(
    ranks: list[Daemon], at: Path, newer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settled(newer)
    changed = update(newer, runtime_dir=at)
    assert not changed.already
    eventually(lambda: all(one.report().digest is not None for one in ranks))  # from then on versions are called by it
    before, begun = [Changer(one).state() for one in ranks], workers(ranks)
    served = ranks[0].report().version
    again = update(newer, runtime_dir=at)
    assert (again.already, again.version, again.before, again.away) == (True, served, served, ())
    assert waiting(ranks) == []
    after = [Changer(one).state() for one in ranks]
    assert [standings(one) for one in after] == [standings(one) for one in before]
    assert {one.change.state for one in after if one.change is not None} == {"aborted"}
    assert [now - then for now, then in zip(workers(ranks), begun, strict=True)] == [1, 1, 0, 0]
    assert commands.update_main(["--model", str(newer), "--quiet", "--runtime-dir", str(at)]) == commands.DONE_EXIT
    assert "is served by every rank already: nothing is changed" in capsys.readouterr().out
    assert rollback(changed.version, runtime_dir=at).already, "and a rollback to it is none either"


def test_what_only_one_rank_has_to_load_is_committed_on_both(ranks: list[Daemon], at: Path, newer: Path) -> None:
    """One serves it already, and the other does not find so: they end with one version all the same."""
    update(settled(newer), runtime_dir=at)
    elsewhere = newer.with_name("elsewhere")
    newer.rename(elsewhere)  # the same files: the receipts stay, and the path is another
    served = [one.state().current for one in map(Changer, ranks)]
    change = Change(ranks, from_directory(elsewhere))
    change.open()
    change.ranks[0].begin(change.transaction, FromHeld(version=versions(ranks)[0]), base=change.bases[0])
    change.prepare(1)
    change.prepared()
    assert resolve(runtime_dir=at) is not None
    after = [one.state().current for one in map(Changer, ranks)]
    assert (after[0] == served[0], after[1] == served[1]) == (True, False)
    assert len(set(versions(ranks))) == 1


def test_who_is_not_there_is_told_which_are(ranks: list[Daemon], at: Path) -> None:
    with pytest.raises(DaemonAbsent, match="expected: elsewhere; found: default"):
        generations(runtime_dir=at, name="elsewhere")


def test_pinned_versions_stay_and_dropped_ones_go(
    ranks: list[Daemon], at: Path, newer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    update(newer, runtime_dir=at, keep=2)
    looked = generations(runtime_dir=at)
    earlier = next(one for one in looked.states()[0][1].generations if one.standing == "previous")
    pin(earlier.version, runtime_dir=at)
    with pytest.raises(UpdateConflict, match="pinned") as refused:
        drop(earlier.version, runtime_dir=at)
    assert str(refused.value.where) == f"tp0of2 at {ranks[0].place.socket_path}"
    with pytest.raises(UpdateConflict, match=rf"is needed.*where: tp0of2 at {ranks[0].place.socket_path}"):
        drop(str(looked.states()[1][1].current), runtime_dir=at)
    arguments = ["--runtime-dir", str(at)]
    assert held_commands.unpin_main([earlier.version, *arguments]) == 0
    assert held_commands.drop_main([earlier.version, *arguments]) == 0
    capsys.readouterr()
    assert held_commands.generations_main(["--json", *arguments]) == held_commands.AGREED_EXIT
    shown = json.loads(capsys.readouterr().out)
    assert [one["rank"]["tp_rank"] for one in shown["ranks"]] == [0, 1]
    assert earlier.version not in [one["version"] for rank in shown["ranks"] for one in rank["generations"]]
    assert held_commands.generations_main(arguments) == held_commands.AGREED_EXIT
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows if " current " in row] == [["tp0of2", "current"], ["tp1of2", "current"]]


def test_one_ranks_generation_stands_for_its_version_which_is_freed_at_all_or_at_none(
    ranks: list[Daemon], at: Path, newer: Path
) -> None:
    """What only some ranks hold could not be rolled back to, and would lie in their memory."""
    update(newer, runtime_dir=at)
    earlier = [next(one for one in Changer(rank).state().generations if one.standing == "previous") for rank in ranks]
    mine, others = [one.generation for one in earlier]

    def pins() -> list[bool | None]:
        states = [Changer(rank).state() for rank in ranks]
        held = [state.generation(one) for state, one in zip(states, (mine, others), strict=True)]
        return [one.pinned if one is not None else None for one in held]

    pin(others, runtime_dir=at)
    assert pins() == [True, True]
    Changer(ranks[0]).ask(Pin(generation=mine, pinned=False), RankState)
    for word in (mine, earlier[0].version):
        with pytest.raises(UpdateConflict, match=r"in use.*where: tp1of2 at"):
            drop(word, runtime_dir=at)
        assert pins() == [False, True]
    pin(mine[:16], pinned=False, runtime_dir=at)
    left = Change(ranks, FromHeld(version=earlier[0].receipts_version))
    left.open()
    left.prepare(1)
    left.prepared(1)
    with pytest.raises(UpdateConflict, match=r"is needed.*prepared.*where: tp1of2 at"):
        drop(mine, runtime_dir=at, force=True)
    left.abort()
    left.resolve()
    assert pins() == [False, False]
    drop(others, runtime_dir=at)
    assert pins() == [None, None]


def test_weights_of_another_configuration_are_refused_by_name_and_nothing_changes(
    ranks: list[Daemon], at: Path, tmp_path: Path
) -> None:
    first = versions(ranks)
    wider = tiny_llama(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(ConfigurationError, match=r"not changed on rank tp[01]of2.*intermediate_size"):
        update(wider, runtime_dir=at)
    assert versions(ranks) == first


def late(folder: Path, **script: Any) -> dict[str, Any]:
    """A script whose second load begins when a byte has been written to ``pipe`` in ``folder``."""
    os.mkfifo(folder / "pipe")
    (folder / "attempts").touch()
    second = {"spoil_from_attempt": 2, "attempts": str(folder / "attempts")}
    return {"hang_at": "job", "release": str(folder / "pipe"), **second, **script}


@contextmanager
def let_go_once_prepared(rank: Daemon, folder: Path) -> Iterator[None]:
    """Who is :func:`late` goes on when ``rank`` is prepared."""

    def let_go() -> None:
        rank.wait_logged("change", change="prepared")
        with open(folder / "pipe", "wb") as pipe:
            pipe.write(b"1")

    helper = threading.Thread(target=let_go, daemon=True)
    helper.start()
    yield
    helper.join(TIMEOUT_S)
    assert not helper.is_alive()


@pytest.mark.parametrize(
    ("spoiled", "error", "why"),
    [({"kill_at": "memory"}, WorkerDied, ""), ({"flip": 4095}, TransferError, ".*1 that differ: weight")],
    ids=["dies", "leaves other bytes than it says"],
)
def test_a_worker_that_fails_on_one_rank_fails_the_change_on_all(
    settled_model: Path,
    newer: Path,
    runtime_dir: Path,
    tmp_path: Path,
    spoiled: dict[str, Any],
    error: type[WeightCacheError],
    why: str,
) -> None:
    with group(settled_model, runtime_dir, scripts={1: late(tmp_path, **spoiled)}) as ranks:
        first = versions(ranks)
        with (
            let_go_once_prepared(ranks[0], tmp_path),
            pytest.raises(error, match=f"not changed on rank tp1of2{why}"),
        ):
            update(newer, runtime_dir=runtime_dir)
        assert versions(ranks) == first
        assert waiting(ranks) == []
        assert [len(Changer(rank).state().generations) for rank in ranks] == [1, 1], "what was prepared is dropped"


MISSING = {"code": "missing_shard", "message": "no such file", "where": "/m/a.safetensors", "next_step": "fetch it"}


@pytest.mark.parametrize(
    ("spoiled", "status"),
    [
        ({"kill_at": "memory"}, commands.NOT_NOW_EXIT),
        ({"fail_at": "job", "fail": {"code": "checkpoint_changed", "message": "?"}}, commands.NOT_NOW_EXIT),
        ({"fail_at": "job", "fail": MISSING}, commands.FAILED_EXIT),
    ],
    ids=["dies", "files change meanwhile", "files are missing"],
)
def test_a_failure_that_another_try_may_not_meet_has_the_status_that_asks_for_one(
    settled_model: Path,
    newer: Path,
    runtime_dir: Path,
    tmp_path: Path,
    spoiled: dict[str, Any],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And one place and one step are named: those of what failed."""
    (tmp_path / "attempts").touch()
    script = {"spoil_from_attempt": 2, "attempts": str(tmp_path / "attempts"), **spoiled}
    with group(settled_model, runtime_dir, size=1, scripts={0: script}):
        assert commands.update_main(["--model", str(newer), "--runtime-dir", str(runtime_dir)]) == status
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the weights of {runtime_dir}/default were not changed on rank tp0of1: " in said
    if spoiled.get("fail") is MISSING:
        assert said.endswith(": no such file; where: /m/a.safetensors; next step: fetch it"), said


def test_a_stopped_rank_is_told_as_alive_and_asks_for_another_try(
    ranks: list[Daemon], at: Path, newer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = ranks[1].report().pid
    monkeypatch.setattr(group_module, "ANSWER_S", 1.0)
    os.kill(keeper, signal.SIGSTOP)
    try:
        status = commands.update_main(["--model", str(newer), "--runtime-dir", str(at)])
    finally:
        os.kill(keeper, signal.SIGCONT)
    errors = capsys.readouterr().err
    assert (status, "alive but silent" in errors, "start the daemons" in errors) == (1, True, False), errors


@pytest.mark.root
def test_a_rank_without_room_is_named_with_the_numbers_and_all_keep_what_they_serve(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """Rank 1 is put into a group with a limit after its first load, which is counted elsewhere."""
    nbytes, limit_nbytes = 120 << 20, 150 << 20
    large = {"segment_nbytes": nbytes}
    with (
        memory_limit(limit_nbytes) as limited,
        group(settled_model, runtime_dir, scripts={0: large, 1: late(tmp_path, **large)}) as ranks,
    ):
        (limited / "cgroup.procs").write_text(str(ranks[1].report().pid))
        first, held = versions(ranks), [standings(Changer(rank).state()) for rank in ranks]
        numbers = rf"{nbytes} for the shard.*\d+ bytes free of {limit_nbytes}.*limit"
        with (
            let_go_once_prepared(ranks[0], tmp_path),
            pytest.raises(InsufficientMemory, match=rf"not changed on rank tp1of2.*{numbers}"),
        ):
            update(newer, runtime_dir=runtime_dir)
        assert [standings(Changer(rank).state()) for rank in ranks] == held, "what was prepared is dropped"
        assert (versions(ranks), waiting(ranks)) == (first, [])


def test_a_slow_rank_is_waited_for_but_not_for_ever(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    with group(settled_model, runtime_dir, scripts={1: late(tmp_path)}) as ranks:
        first = versions(ranks)
        with pytest.raises(DaemonNotReady, match="tp1of2: not prepared in time"):
            update(newer, runtime_dir=runtime_dir, timeout_s=2)
        assert (versions(ranks), waiting(ranks)) == (first, [])
        with let_go_once_prepared(ranks[0], tmp_path):
            update(newer, runtime_dir=runtime_dir, timeout_s=60)
        assert len(set(versions(ranks))) == 1
        assert versions(ranks) != first


@pytest.mark.parametrize(
    ("released", "loads"),
    [(0, 0), (1, 1), (0, 1)],
    ids=["rank 0 while it loads", "rank 1 while it loads", "rank 0, which has it prepared"],
)
def test_a_rank_that_is_released_ends_the_change_and_is_named(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path, released: int, loads: int
) -> None:
    """At once, not when the time is over: it has an hour."""
    with group(settled_model, runtime_dir, scripts={loads: late(tmp_path)}) as ranks, ThreadPoolExecutor() as threads:
        other = versions(ranks)[1 - released]
        changing = threads.submit(update, newer, runtime_dir=runtime_dir)
        for number, one in enumerate(ranks):
            one.wait_logged("change", change="preparing" if number == loads else "prepared")
        began_s = time.monotonic()
        channel = ranks[released].connect()
        assert isinstance(ask(channel, Release()), Released)
        channel.close()
        with pytest.raises((DaemonDraining, DaemonAbsent), match=rf"not changed on rank tp{released}of2[: ]") as raised:
            changing.result(TIMEOUT_S)
        may_be_open = released == 0 and raised.type is DaemonDraining  # who only drains may come back with its record
        assert may_be_open or "still be open" not in str(raised.value)
        assert time.monotonic() - began_s < 15
        assert versions([ranks[1 - released]]) == [other]


def test_a_rank_that_cannot_read_what_was_decided_is_not_tried_for_ever(
    settled_model: Path, newer: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of another leader, whose socket nobody listens at: whoever gives up what is open is refused."""
    monkeypatch.setattr(coordinator, "ANSWER_S", 1.0)
    with group(settled_model, runtime_dir) as ranks:
        elsewhere = Place(runtime_dir, ranks[0].place.name, "host-elsewhere")
        other = Change(ranks, from_directory(newer))
        other.open()
        asked = Prepare(
            transaction=other.transaction, leader=elsewhere.device, base=other.bases[1], source=other.source
        )
        other.ranks[1].ask(asked, RankState)
        other.prepared(1)
        other.abort()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(elsewhere.control_path))
        steps: list[Step] = []
        where = Where.of(runtime_dir=runtime_dir, timeout_s=20)
        with pytest.raises(UpdateConflict, match=rf"on rank tp1of2: another change.*{other.transaction}"):
            asyncio.run(changes.update(where, newer, force=True, told=steps.append))
        assert sum(step.phase is Phase.APPLY for step in steps) == 2, "and once more, for what came in between"


def test_only_who_is_late_is_named_when_the_time_is_over(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """Rank 1 hangs, and rank 0 is done while the answer of rank 1 is waited for."""
    for folder in (tmp_path / "0", tmp_path / "1"):
        folder.mkdir()
    scripts = {number: late(tmp_path / str(number)) for number in (0, 1)}
    with group(settled_model, runtime_dir, scripts=scripts) as ranks, ThreadPoolExecutor() as threads:
        hung = ranks[1].report().pid
        began_s = time.monotonic()
        changing = threads.submit(update, newer, runtime_dir=runtime_dir, timeout_s=8)
        for one in ranks:
            one.wait_logged("change", change="preparing")
        os.kill(hung, signal.SIGSTOP)
        try:
            with open(tmp_path / "0" / "pipe", "wb") as pipe:
                pipe.write(b"1")
            with pytest.raises(DaemonNotReady, match="not changed: tp1of2: no answer in time"):
                changing.result(TIMEOUT_S)
            assert time.monotonic() - began_s < 8 + 8
        finally:
            os.kill(hung, signal.SIGCONT)
        eventually(lambda: waiting(ranks) == [])


def test_a_group_that_lacks_a_rank_is_not_changed(settled_model: Path, newer: Path, runtime_dir: Path) -> None:
    with scripted_daemon(settled_model, runtime_dir, layout="fused", tp_size=2, tp_rank=0) as alone:
        alone.wait_until("ready")
        with pytest.raises(DaemonAbsent, match="tp1of2"):
            update(newer, runtime_dir=runtime_dir)
        assert held_commands.generations_main(["--runtime-dir", str(runtime_dir)]) == held_commands.DIFFERENT_EXIT
    with pytest.raises(DaemonAbsent):
        generations(runtime_dir=runtime_dir)
    assert commands.update_main(["--runtime-dir", str(runtime_dir), "--model", str(newer)]) == commands.FAILED_EXIT


def test_ranks_that_are_not_there_yet_or_still_load_are_waited_for_where_that_is_asked(
    settled_model: Path, newer: Path, runtime_dir: Path, tmp_path: Path
) -> None:
    """Rank 1's keeper is dead at first, and the next one loads until a byte has been written to the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    slow = {"hang_at": "job", "release": str(pipe), "attempts": str(tmp_path / "attempts"), "only_attempts": 1}
    shard: dict[str, Any] = {"layout": "fused", "tp_size": 2}
    steps: queue.Queue[Step] = queue.Queue()

    def until(wanted: Callable[[Step], bool]) -> None:
        while not wanted(steps.get(timeout=TIMEOUT_S)):
            pass

    with scripted_daemon(settled_model, runtime_dir, **shard, tp_rank=0) as leader, ThreadPoolExecutor() as threads:
        with scripted_daemon(settled_model, runtime_dir, **shard, tp_rank=1) as dead:
            for one in (leader, dead):
                one.wait_until("ready")
            dead.stop(signal.SIGKILL)
        where = Where.of(runtime_dir=runtime_dir, timeout_s=TIMEOUT_S)
        waits = threads.submit(lambda: asyncio.run(changes.update(where, newer, wait=True, told=steps.put)))
        until(lambda step: step.phase is Phase.LOOK)
        with scripted_daemon(settled_model, runtime_dir, script=slow, **shard, tp_rank=1) as second:
            second.wait_logged("state", state="loading")
            for wait, timeout_s in ((False, TIMEOUT_S), (True, 1.2)):
                with pytest.raises(DaemonNotReady, match=r"on rank tp1of2: it serves no weights yet.*--wait"):
                    update(newer, runtime_dir=runtime_dir, wait=wait, timeout_s=timeout_s)
            until(lambda step: step.phase is Phase.LOOK and [word for word, _ in step.reports] == ["tp1of2"])
            pipe.write_bytes(b"1")
            changed = waits.result(TIMEOUT_S)
            assert versions([leader, second]) == [changed.version] * 2
