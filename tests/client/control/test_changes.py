"""Update, rollback, and what is held, over two real ranks: all change or none does; refusals say who, and why."""

from __future__ import annotations

from pathlib import Path

from tests.support.groups import group, versions, waiting
from weightcached.client.control import rollback, update


def test_updated_and_rolled_back_on_both_ranks(settled_model: Path, other: Path, runtime_dir: Path) -> None:
    with group(settled_model, runtime_dir) as ranks:
        first = versions(ranks)
        assert len(set(first)) == 1
        changed = update(other, runtime_dir=runtime_dir)
        assert changed.away == ()
        second = versions(ranks)
        assert len(set(second)) == 1
        assert second != first
        assert waiting(ranks) == []
        back = rollback(runtime_dir=runtime_dir)
        assert versions(ranks) == first
        assert back.before == changed.version
        forward = rollback(changed.version, runtime_dir=runtime_dir)
        assert (forward.version, versions(ranks)) == (changed.version, second)
