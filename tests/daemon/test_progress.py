"""Progress: the rate is that of the last seconds, displays show stages, a change wakes whoever waits."""

import asyncio
import io
import logging
from typing import Any, cast

import pytest

from weightcached.daemon.events import Events
from weightcached.daemon.progress import Bar, Changes, Lines, ProgressTracker
from weightcached.daemon.record import Record
from weightcached.protocol.control import EventKind
from weightcached.protocol.messages import Loading


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Shown:
    def __init__(self) -> None:
        self.seen: list[Loading] = []

    def show(self, loading: Loading) -> None:
        self.seen.append(loading)

    def close(self) -> None:
        pass


def test_the_rate_is_that_of_the_last_seconds() -> None:
    clock, display = Clock(), Shown()
    tracker = ProgressTracker(display, clock=clock)
    for second in range(11):
        clock.now_s = 100.0 + second
        done = 100 * min(second, 5) + 1000 * max(0, second - 5)  # ten times faster in its second half
        tracker.update("read", bytes_done=done, bytes_total=10_000)
    assert tracker.current.bytes_per_s == pytest.approx(1000)
    assert [one.bytes_done for one in display.seen][:3] == [0, 100, 200]


def test_a_new_stage_begins_a_new_rate() -> None:
    clock = Clock()
    tracker = ProgressTracker(Shown(), clock=clock)
    tracker.update("read", bytes_done=0, bytes_total=100)
    clock.now_s += 1
    tracker.update("read", bytes_done=100, bytes_total=100)
    assert tracker.current.bytes_per_s == 100
    tracker.update("quantize", bytes_done=0, bytes_total=100)
    assert tracker.current == Loading(stage="quantize", bytes_done=0, bytes_total=100, bytes_per_s=0.0)


def test_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = Lines(clock=clock)
    with caplog.at_level(logging.INFO):
        for tenth in range(101):
            clock.now_s = 100.0 + tenth / 10
            lines.show(Loading(stage="read", bytes_done=tenth, bytes_total=100, bytes_per_s=10.0))
        lines.show(Loading(stage="seal", bytes_done=0, bytes_total=0, bytes_per_s=0.0))
    assert [(record.stage, getattr(record, "percent", None)) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("read", 0.0),
        ("read", 50.0),
        ("read", 100.0),
        ("seal", None),
    ]


def test_a_bar_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    bar = Bar()
    bar.show(Loading(stage="read", bytes_done=0, bytes_total=1 << 20, bytes_per_s=0.0))
    bar.show(Loading(stage="read", bytes_done=1 << 20, bytes_total=1 << 20, bytes_per_s=0.0))
    bar.show(Loading(stage="seal", bytes_done=0, bytes_total=0, bytes_per_s=0.0))
    bar.close()
    assert "read:   0%" in stream.getvalue()
    assert "1.05M" in stream.getvalue()


async def test_a_change_wakes_everybody_who_waits_and_nobody_later() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait(30)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.announce()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await changes.wait(0.01) is False


def test_an_event_is_a_new_stage_or_more_bytes_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []

    class Heard(Events):
        def say(self, kind: EventKind, message: str = "", **fields: Any) -> None:
            said.append((fields["stage"], fields["bytes_done"]))

    events = Heard(cast(Record, None))
    monkeypatch.setattr("weightcached.daemon.events.PROGRESS_INTERVAL_S", 0.0)
    for stage, done in (("read", 0), ("read", 0), ("read", 5), ("read", 5), ("ready", 0), ("ready", 0), ("read", 5)):
        events.progress(Loading(stage=stage, bytes_done=done, bytes_total=5, bytes_per_s=0.0))
    assert said == [("read", 0), ("read", 5), ("ready", 0), ("read", 5)]
