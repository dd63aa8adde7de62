"""What the demo says: pure functions over made-up measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from weightcached.client.demo import report
from weightcached.client.demo.embeddings import EmbeddingStory, cosine
from weightcached.client.demo.engines import EngineStory, Start
from weightcached.client.demo.shards import SHARDS, ShardStory, Timing
from weightcached.client.demo.table import Group, decimal_size, render, seconds

MEMORY = {"RssAnon": 21_000_000, "RssShmem": 0, "RssFile": 1}


def start(label: str, ids: tuple[int, ...] = (1, 2), shared: int | None = None) -> Start:
    return Start(label, 0.05, 0.75, 5.0, 6.5, ids, shared)


def timing(digest: str = "d", cached: float | None = None) -> Timing:
    return Timing(1.25, 1.5, 500_000_000, digest, cached)


@pytest.fixture
def engines() -> EngineStory:
    story = EngineStory(daemon_ready_s=3.0, daemon_memory=MEMORY, engine_memory=MEMORY, status="ready")
    story.add(start("from disk, cold page cache"))
    story.add(start("from the daemon, first start", shared=1_000_000_000))
    return story


@pytest.fixture
def shards() -> list[ShardStory]:
    return [ShardStory(shard, timing(cached=0.0), timing(), timing()) for shard in SHARDS]


def test_the_table_has_every_row_and_its_columns_line_up(engines: EngineStory, shards: list[ShardStory]) -> None:
    lines = report.table(engines, shards).splitlines()
    for start_ in engines.starts:
        assert sum(start_.label in line for line in lines) == 1
    for shard in SHARDS:
        assert sum(shard.label in line for line in lines) == 3
    row = next(line for line in lines if "from the daemon, first start" in line)
    assert row.split()[-6:] == ["0.050", "0.75", "5.00", "6.50", "1.00", "GB"]
    assert max(map(len, lines)) <= 100  # a terminal, a log, a README
    assert max(map(len, report.notes(engines, shards).splitlines())) <= report.LINE_WIDTH


def test_equal_answers_are_agreement_and_a_different_one_is_not(engines: EngineStory) -> None:
    assert engines.agrees
    assert "OK: 2 answers" in report.answers(engines)
    engines.add(start("after SIGKILL", ids=(1, 3)))
    assert not engines.agrees
    assert "MISMATCH" in report.answers(engines)


@pytest.mark.parametrize("ids", [(), None])
def test_no_answer_is_no_agreement(ids: tuple[int, ...] | None) -> None:
    story = EngineStory()
    if ids is not None:
        story.add(start("only", ids=ids))
    assert not story.agrees


@pytest.mark.parametrize("way", ["cold", "warm", "daemon"])
def test_other_bytes_are_a_mismatch(shards: list[ShardStory], way: str) -> None:
    assert "OK: 3 shards" in report.bytes_agree(shards)
    shards[1] = replace(shards[1], **{way: timing("other")})  # type: ignore[arg-type]
    assert "MISMATCH" in report.bytes_agree(shards)


def test_files_that_would_not_get_cold_are_said(engines: EngineStory, shards: list[ShardStory]) -> None:
    assert "NOT COLD" not in report.notes(engines, shards)
    engines.cached_fraction = 1.0
    assert "NOT COLD: up to 100%" in report.notes(engines, shards)


@pytest.mark.parametrize(("exact", "word"), [(True, "OK"), (False, "MISMATCH")])
def test_embeddings_are_judged_by_their_bits(exact: bool, word: str) -> None:
    story = EmbeddingStory(Path("/m"), 3, 384, exact, 1.0, 0.0, 0.6, 0.1)
    assert f"{word}: embeddings equal bit for bit" in report.embeddings(story)


def test_paths_with_spaces_survive_a_shell() -> None:
    text = report.try_next("weightcached", Path("/my models/minilm"), Path("/kept here"))
    assert "'/my models/minilm'" in text
    assert "'/kept here'" in text


def test_numbers() -> None:
    assert [seconds(value) for value in (0.0041, 0.0999, 0.1, 12.345)] == ["0.004", "0.100", "0.10", "12.35"]
    assert [decimal_size(value) for value in (1_000_000_000, 21_400_000, 0)] == ["1.00 GB", "21.4 MB", "0.0 MB"]
    assert cosine([1.0, 0.0], [0.0, 2.0]) == 0
    assert cosine([1.0, 1.0], [2.0, 2.0]) == pytest.approx(1)


def test_a_row_has_a_cell_for_each_column() -> None:
    group = Group("title", ("a", "b"))
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        group.add("row", "1")
    group.add("row", "1", None)
    assert render([group]).splitlines()[2].split() == ["row", "1", "-"]
