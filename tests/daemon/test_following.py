"""A rank that has prepared a change and is not the leader: it reads the decision where it is written, sooner or later,
and never assumes one."""

import asyncio
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commanding import Changer, from_directory, new_transaction, other_weights, standings
from tests.support.daemons import Daemon, converse
from tests.support.generations import generation, published
from tests.support.manager import Manager
from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.changing import Changing
from weightcached.daemon.custody import Custody
from weightcached.daemon.following import ANSWER_TIMEOUT_S, PAUSE_MAX_S, Following
from weightcached.daemon.generations import Generations
from weightcached.daemon.holdings import Holdings
from weightcached.daemon.state_record import PreparedRecord, StateFile
from weightcached.daemon.vault import NoVault
from weightcached.protocol.control import ChangeInfo, Decided, Prepare, RankState, Resolve
from weightcached.protocol.errors import (
    DaemonAbsent,
    DaemonNotReady,
    DaemonUnreachable,
    GenerationGone,
    InvalidOption,
    InvalidPlace,
    ProtocolError,
)
from weightcached.protocol.framing import Frame
from weightcached.protocol.messages import Grant, Message, Refused, Switch
from weightcached.protocol.places import Place
from weightcached.protocol.transaction import Decision, Outcome


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return other_weights(model, tmp_path / "other")


@pytest.fixture
def start(model: Path, runtime_dir: Path) -> Iterator[Callable[[int], Daemon]]:
    """Starts the next keeper of rank 0 or 1 of two, each under a manager of its own."""
    with ExitStack() as ending:
        managers = []
        for rank in (0, 1):
            directory = runtime_dir.parent / f"m{rank}"
            directory.mkdir()
            managers.append(ending.enter_context(Manager(directory)))

        def start(rank: int) -> Daemon:
            started = managers[rank].start(model, runtime_dir, tp_size=2, tp_rank=rank)
            ending.callback(started.stop, signal.SIGKILL)
            return started

        yield start


def both_ready(start: Callable[[int], Daemon]) -> tuple[list[Daemon], Changer, Changer]:
    """The daemons, rank 0 first, and who changes each: the leader, and the one that follows it."""
    ranks = [start(0), start(1)]
    for rank in ranks:
        rank.wait_until("ready")
    leader = Changer(ranks[0])
    return ranks, leader, Changer(ranks[1], leader)


def version_prepared(rank: Changer) -> str:
    return next(one.version for one in rank.state().generations if one.standing == "prepared")


def both_prepared(leader: Changer, follower: Changer, source: Path) -> str:
    leader.open(transaction := new_transaction())
    for rank in (leader, follower):
        rank.begin(transaction, from_directory(source))
    for rank in (leader, follower):
        change = rank.ended(transaction).change
        assert change is not None
        assert change.state == "prepared", change
    return transaction


def wait_change(daemon: Daemon, state: str) -> None:
    daemon.wait_logged("change", change=state)


def test_a_prepared_rank_switches_once_the_leader_has_written_so(start: Callable[[int], Daemon], other: Path) -> None:
    ranks, leader, follower = both_ready(start)
    transaction = both_prepared(leader, follower, other)
    waiting = follower.ask(Resolve(transaction=transaction), RankState)
    assert waiting.change is not None
    assert waiting.change.state == "prepared"
    decided = leader.decide(transaction, commit=True)
    wait_change(ranks[1], "committed")  # by itself
    assert follower.state().generations[0].version == decided.version
    with pytest.raises(InvalidOption):
        Changer(ranks[1]).decide(transaction, commit=True)


@pytest.mark.parametrize("word", ["../default/host-tp0of2", "", ".", "host-tp0of2\n", "a" * 200])
def test_a_leader_that_no_place_could_have_is_refused_before_anything_is_prepared(
    start: Callable[[int], Daemon], other: Path, word: str
) -> None:
    rank = start(1)
    rank.wait_until("ready")
    follower = Changer(rank)
    source = from_directory(other)
    asked = Prepare(transaction=new_transaction(), leader=word, base=follower.current(), source=source)
    with pytest.raises((InvalidOption, InvalidPlace)):
        follower.ask(asked, RankState)
    assert follower.state().change is None


def test_an_abort_reaches_a_rank_that_is_prepared(start: Callable[[int], Daemon], other: Path) -> None:
    ranks, leader, follower = both_ready(start)
    before = [rank.current() for rank in (leader, follower)]
    transaction = both_prepared(leader, follower, other)
    leader.decide(transaction, commit=False)
    follower.ask(Resolve(transaction=transaction), RankState)
    ranks[1].wait_logged("generation dropped")
    for rank, before_it in zip((leader, follower), before, strict=True):
        assert standings(rank.state()) == [(before_it, "current")]


def test_both_are_killed_in_between_and_the_follower_finds_the_decision(
    start: Callable[[int], Daemon], other: Path
) -> None:
    """The follower dies prepared; the leader decides, and dies too. Nobody tells the follower that comes back."""
    ranks, leader, follower = both_ready(start)
    transaction = both_prepared(leader, follower, other)
    ranks[1].stop(signal.SIGKILL)
    decided = leader.decide(transaction, commit=True)
    ranks[0].stop(signal.SIGKILL)
    returned = start(1)
    returned.wait_until("ready")
    state = Changer(returned).state()
    assert state.change is not None
    assert state.change.state == "prepared"
    returned.wait_logged("the leader's decision is not known yet")
    assert Changer(returned).state().generations[0].version != decided.version
    start(0).wait_until("ready")
    wait_change(returned, "committed")
    assert Changer(returned).state().generations[0].version == decided.version


def test_an_engine_that_wants_what_is_prepared_waits_for_the_decision(
    start: Callable[[int], Daemon], other: Path
) -> None:
    ranks, leader, follower = both_ready(start)
    transaction = both_prepared(leader, follower, other)
    version = version_prepared(follower)
    answers: list[Frame] = []
    channel = ranks[1].connect()
    try:
        asking = threading.Thread(
            target=lambda: answers.append(converse(channel, ranks[1].hello(want=version))), daemon=True
        )
        asking.start()
        # Asked, it looks at the leader's record at once; there is nothing in it yet.
        assert follower.state().change is not None
        leader.decide(transaction, commit=True)
        asking.join(60)
        [frame] = answers
        with frame.fds:
            assert isinstance(frame.message, Grant)
            assert version in (frame.message.version, frame.message.receipts_version)
    finally:
        channel.close()


def test_an_engine_that_would_switch_to_what_is_prepared_is_told_to_ask_again(
    start: Callable[[int], Daemon], other: Path
) -> None:
    """It saw the version at rank 0. Asked, this rank reads the decision at once, instead of when its pause is over."""
    ranks, leader, follower = both_ready(start)
    transaction = both_prepared(leader, follower, other)
    version = version_prepared(follower)
    with closing(ranks[1].connect()) as channel:
        with converse(channel, ranks[1].hello(want="current")).fds:
            pass
        assert refusal(converse(channel, Switch(version="digest:" + "0" * 64))) == GenerationGone.code
        assert refusal(converse(channel, Switch(version=version))) == DaemonNotReady.code
        leader.decide(transaction, commit=True)
        refused: str | None = DaemonNotReady.code
        while refused is not None:
            assert refused == DaemonNotReady.code
            refused = refusal(converse(channel, Switch(version=version)))


def refusal(frame: Frame) -> str | None:
    """The code of the refusal that it is; None for a grant."""
    with frame.fds:
        assert isinstance(frame.message, Refused | Grant)
        return frame.message.code if isinstance(frame.message, Refused) else None


def test_an_error_of_ours_does_not_end_the_following(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that had stopped asking would hold what is prepared for ever, and say nothing."""
    transaction = new_transaction()
    prepared = ChangeInfo(transaction=transaction, state="prepared", leader="host-tp0of2")
    changing = SimpleNamespace(info=prepared)
    acted: list[Decision] = []
    decided = asyncio.Event()

    async def act(decision: Decision) -> None:
        if not acted:
            acted.append(decision)
            raise ZeroDivisionError("ours")
        changing.info = prepared.model_copy(update={"state": "aborted"})
        decided.set()

    async def asked(_place: Place, _request: Message, _answer: Any, *, deadline: Any) -> Any:
        return Decided(transaction=transaction, outcome=Outcome.ABORTED, vault_id="3" * 32)

    async def follow() -> None:
        changing.act = act
        following = Following(Place(Path("/run"), "default", "host-tp1of2"), changing, asked)  # type: ignore[arg-type]
        following.start()
        async with asyncio.timeout(20):
            await decided.wait()
        await following.stop()

    asyncio.run(follow())
    [record] = [one for one in caplog.records if one.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


class _Skipping(selectors.DefaultSelector):
    """Lets time go by at once, wherever an event loop would wait."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "it waits for nothing that will come"
        self.skipped_s += max(timeout, 0)
        return super().select(0)


class _Hurried(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.skipped_s


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.ABORTED])
def test_however_long_the_decision_is_not_known_nothing_is_done(outcome: Outcome) -> None:
    """A thousand readings that fail in every way, hours of them; then the one that says what was decided."""
    served, newer = (generation(id=f"{number:032x}") for number in (1, 2))
    waiting = PreparedRecord(transaction=new_transaction(), generation=newer.id, leader="host-tp0of2")
    held = Generations(keep=1, grace_s=0.0)
    held.add(published(served))
    held.make_current(served.id)
    held.add(published(newer, staged=True))
    custody = Custody(NoVault(), Holdings(), StateFile.create())
    changes = ChangeCustody(custody)
    changes.prepare_held(waiting)
    acted: list[tuple[str, int]] = []
    asked = count(1)
    readings = 0

    async def drop(generation_id: str, *, reason: str) -> None:
        acted.append((f"dropped {generation_id}", readings))

    record: Any = SimpleNamespace(
        generations=held,
        last_error=None,
        options=SimpleNamespace(keep_generations=1),
        events=SimpleNamespace(say=lambda *_: None),
        changes=SimpleNamespace(announce=lambda: None),
    )
    publishing: Any = SimpleNamespace(switch=lambda id_: acted.append((f"served {id_}", readings)))
    freeing: Any = SimpleNamespace(drop=drop, wake=lambda: None)
    making: Any = SimpleNamespace()

    async def nobody_gives_up(_: str) -> None:
        raise AssertionError

    changing = Changing(record, changes, publishing, freeing, making, nobody_gives_up)
    changing.restore()

    async def read(_place: Place, request: Message, _answer: Any, *, deadline: Any) -> Any:
        nonlocal readings
        readings = next(asked)
        answer = Decided(transaction=waiting.transaction, outcome=outcome, vault_id="3" * 32)
        if readings > 1000:
            versions = {"version": newer.version, "receipts_version": newer.receipts_version}
            return answer.model_copy(update=versions if outcome.is_commit else {})
        match readings % 6:
            case 0:
                await asyncio.sleep(ANSWER_TIMEOUT_S)
                raise DaemonNotReady("no answer in time")
            case 1:
                return answer.model_copy(update={"outcome": Outcome.OPEN})
            case 2:
                return answer.model_copy(update={"outcome": Outcome.UNKNOWN})
            case 3:
                raise DaemonUnreachable("nobody listens")
            case 4:
                raise DaemonAbsent("no weights are cached here")
        raise ProtocolError("that is no answer")

    async def follow() -> float:
        following = Following(Place(Path("/run"), "default", "host-tp1of2"), changing, read)  # type: ignore[arg-type]
        following.start()
        while readings < 1000:
            assert (changes.prepared, acted) == (waiting, [])
            assert changing.info is not None
            assert changing.info.state == "prepared"
            await asyncio.sleep(PAUSE_MAX_S)
        for _ in range(10):  # more than are needed: it asks no more
            following.start()
            await asyncio.sleep(PAUSE_MAX_S)
        await following.stop()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=_Hurried) as runner:
        assert runner.run(follow()) > 1000 * PAUSE_MAX_S
    assert acted == [(f"{'served' if outcome.is_commit else 'dropped'} {newer.id}", 1001)]
    assert readings == 1001
    assert changes.prepared is None
    custody.close()
