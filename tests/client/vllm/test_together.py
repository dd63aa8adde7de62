"""Who asks for what, and when: ranks as threads, and vLLM's group as what passes words between them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.client.agreement import Standing
from weightcached.client.vllm import together
from weightcached.client.vllm.together import Found, obtain_together
from weightcached.protocol.config import Parallel
from weightcached.protocol.errors import DaemonFailed, RanksDisagree

OLD, NEW = "receipts:1", "receipts:2"
TIMEOUT_S = 20


@dataclass
class Group:
    """Two ranks in the middle of a change: the first grants the new version already, the second grants it only to who
    asks for it, and the old one else. ``failing`` ranks grant nothing.
    """

    failing: frozenset[int] = frozenset()
    asked: dict[int, str | None] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._local = threading.local()
        self._said: list[Standing | None] = [None, None]
        self._barrier = threading.Barrier(2, timeout=TIMEOUT_S)

    def world(self) -> SimpleNamespace:
        return SimpleNamespace(rank_in_group=self._local.rank, world_size=2, cpu_group=None)

    def exchange(self, mine: Standing, _group: object) -> list[Standing]:
        self._said[self._local.rank] = mine
        self._barrier.wait()
        said = [one for one in self._said if one is not None]
        self._barrier.wait()
        return said

    def attach(self, wish: Any, *, want: str | None = None) -> SimpleNamespace:
        rank: int = self._local.rank
        self.asked[rank] = want
        if rank in self.failing:
            raise DaemonFailed("it could not load")
        version = NEW if rank == 0 or want == NEW else OLD
        return SimpleNamespace(
            version=version, receipts_version=version, generation=f"{rank}" * 32, close=lambda: self.closed.append(rank)
        )

    def obtain(self, *, leader_first: bool) -> list[Found | Exception]:
        def one(rank: int) -> Found | Exception:
            self._local.rank = rank
            parallel = Parallel(tp_size=2, tp_rank=rank)
            wish: Any = SimpleNamespace(parallel=parallel, place=SimpleNamespace(socket_path=f"rank{rank}.sock"))
            try:
                return obtain_together(lambda: wish, leader_first=leader_first, may_fall_back=False)
            except (DaemonFailed, RanksDisagree) as error:
                return error

        with ThreadPoolExecutor() as threads:
            return [each.result(TIMEOUT_S) for each in [threads.submit(one, rank) for rank in range(2)]]


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Group]:
    def make(*failing: int) -> Group:
        group = Group(frozenset(failing))
        monkeypatch.setitem(
            sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(get_world_group=group.world)
        )
        monkeypatch.setattr(together, "exchange", group.exchange)
        monkeypatch.setattr(together, "weights_for", group.attach)
        return group

    return make


def test_ranks_that_start_while_daemons_change_over_have_the_version_of_rank_0(group_of: Callable[..., Group]) -> None:
    group = group_of()
    found = group.obtain(leader_first=True)
    assert [one.weights.version for one in found if isinstance(one, Found) and one.weights is not None] == [NEW, NEW]
    assert group.asked == {0: None, 1: NEW}


def test_ranks_that_ask_at_once_and_get_different_versions_stop(group_of: Callable[..., Group]) -> None:
    group = group_of()
    assert [type(one) for one in group.obtain(leader_first=False)] == [RanksDisagree] * 2
    assert group.asked == {0: None, 1: None}
    assert sorted(group.closed) == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_one_that_has_failed(group_of: Callable[..., Group], failing: int) -> None:
    group = group_of(failing)
    found = group.obtain(leader_first=True)
    assert [type(one) for one in found] == [DaemonFailed if rank == failing else RanksDisagree for rank in range(2)]
    assert group.closed == [1 - failing]
