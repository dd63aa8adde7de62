"""What ranks say to each other: it survives the exchange, and a group goes on only if all have the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightcached.client.agreement import (
    SLOT_NBYTES,
    Standing,
    agree,
    packed,
    require_agreement,
    unpacked,
)
from weightcached.protocol.errors import RanksDisagree

FIRST = Standing(
    rank="tp0of2",
    place="/r/n/host-tp0of2.sock",
    source="daemon",
    version="v",
    receipts_version="r",
    generation="0" * 32,
)
SECOND = FIRST.model_copy(update={"rank": "tp1of2", "place": "/r/n/host-tp1of2.sock", "generation": "1" * 32})
ABSENT = Standing(rank="tp1of2", place="/r/n/host-tp1of2.sock", source="disk")
FAILED = Standing(rank="tp1of2", place="/r/n/host-tp1of2.sock", source="nothing", error="config_mismatch: dtype")


def changed(standing: Standing, **fields: object) -> Standing:
    return standing.model_copy(update=fields)


@pytest.mark.parametrize(
    "standings",
    [
        pytest.param([FIRST, SECOND], id="same"),
        pytest.param([FIRST], id="alone"),
        pytest.param([ABSENT, changed(ABSENT, rank="tp0of2")], id="nobody has a daemon"),
        pytest.param([FIRST, changed(SECOND, version="by digest")], id="one knows the digest already"),
        pytest.param([FIRST, changed(SECOND, receipts_version="of another host")], id="receipts of two hosts"),
    ],
)
def test_ranks_with_the_same_of_the_same_go_on(standings: list[Standing]) -> None:
    assert agree(standings)
    require_agreement(standings)


@pytest.mark.parametrize(
    "standings",
    [
        pytest.param([FIRST, changed(SECOND, version="w", receipts_version="s")], id="other versions"),
        pytest.param([FIRST, ABSENT], id="one fell back"),
        pytest.param([FIRST, FAILED], id="one failed"),
        pytest.param([FAILED, changed(FAILED, rank="tp0of2")], id="all failed"),
        pytest.param(
            [FIRST, SECOND, changed(FIRST, rank="tp0of2-pp1of2", version="w", receipts_version="s")], id="another stage"
        ),
    ],
)
def test_ranks_that_differ_stop_with_who_has_what(standings: list[Standing]) -> None:
    assert not agree(standings)
    with pytest.raises(RanksDisagree) as caught:
        require_agreement(standings)
    for one in standings:
        assert f"{one.rank} {one.source}" in str(caught.value)
        assert one.place in str(caught.value)
        assert (one.error or "") in str(caught.value)


def test_the_longest_words_fit_the_slot() -> None:
    long = Standing(
        rank="tp127of128-pp127of128-ep127of128",
        place="/" + "p" * 107,
        source="nothing",
        version="digest:" + "0" * 64,
        receipts_version="receipts:" + "0" * 64,
        generation="0" * 32,
        error="\u00e9\n" * 4000,
    )
    slot = packed(long)
    assert len(slot) == SLOT_NBYTES
    assert unpacked(slot).place == long.place


def test_a_slot_that_lies_about_its_length_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        unpacked((SLOT_NBYTES).to_bytes(4, "little") + bytes(SLOT_NBYTES - 4))


ONE_RANK = """
import json, sys
import torch.distributed
from weightcached.client.agreement import Standing
from weightcached.client.vllm.together import exchange
rank, store, mine = int(sys.argv[1]), sys.argv[2], Standing.model_validate_json(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
print(json.dumps([one.model_dump() for one in exchange(mine, torch.distributed.group.WORLD)]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_hear_each_other_in_the_groups_order(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, str(rank), str(tmp_path / "store"), mine.model_dump_json()],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, mine in enumerate((FIRST, FAILED))
    ]
    heard = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert heard == [[FIRST.model_dump(), FAILED.model_dump()]] * 2
