"""What `weightcached status` prints of one report: everything that an operator has to act on."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import READY, held
from weightcached.daemon.seen import Seen
from weightcached.daemon.status import exit_code, render
from weightcached.protocol.messages import LeaseInfo
from weightcached.protocol.places import Place

PLACE = Place(Path("/run/weightcached"), "default", "host-tp0of1")
QUIET: dict[str, Any] = {"leases": (), "lease_count": 0, "quarantined": (), "held": (), "vault": "kept"}


def lines(**changes: Any) -> list[str]:
    return render([Seen(PLACE, report=READY.model_copy(update={**QUIET, **changes}))])


def test_a_place_without_trouble_is_one_line() -> None:
    assert len(lines()) == 2
    assert len(lines(vault="none", vault_reason="no service manager")) == 2  # was chosen so


def test_a_row_names_its_layout_an_engine_s_by_the_engine() -> None:
    heading, row = (line.split() for line in lines(layout="vllm", model="m"))
    assert row[heading.index("LAYOUT")] == "vllm"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vault": "dropped", "vault_reason": "raise --store-max"}, "vault: dropped: raise --store-max"),
        ({"vault": "unproven", "vault_reason": "who knows"}, "vault: unproven: who knows"),
        ({"unproven_reason": "the files are gone"}, "unproven: the files are gone"),
        ({"quarantined": ("d" * 32,), "quarantined_nbytes": 2048}, f"quarantined: {'d' * 32}, 2.0 KiB"),
        ({"last_error": "transfer: torn"}, "last error: transfer: torn"),
        ({"lease_count": 3}, "and 3 more leases"),
    ],
)
def test_trouble_is_said(changes: dict[str, Any], said: str) -> None:
    [_, _, line] = lines(**changes)
    assert line.startswith(f"default/host-tp0of1: {said}")


def test_what_is_held_beside_what_is_served_is_a_line_each() -> None:
    current, pinned = held("a" * 32), held("c" * 32, pinned=True)
    previous = held("e" * 32, standing="previous", resident_nbytes=2048, leases=1, pinned=True, pinned_for_s=30.0)
    prepared = held("f" * 32, standing="prepared", leases=0)
    [_, _, first, second] = lines(held=(current, prepared, previous))
    assert "prepared generation ffffffffffff" in first
    assert first.endswith("0 leases, from /models/a")
    assert second.endswith("2.0 KiB, 1 lease, pinned for 30s, from /models/a")
    assert len(lines(held=(current,))) == 2
    assert lines(held=(pinned,))[2].endswith("3 leases, pinned, from /models/a")


def test_ranks_that_serve_different_versions_are_told() -> None:
    """Those of one name; a digest that one of them does not know yet makes no difference."""

    def seen(device: str, version: str, receipts: str, *, name: str = "m") -> Seen:
        served = held("a" * 32, version=version, receipts_version=receipts)
        tp_size = int(device[-1])
        report = READY.model_copy(
            update={**QUIET, "tp_size": tp_size, "tp_rank": 0, "version": version, "held": (served,)}
        )
        return Seen(Place(Path("/run/weightcached"), name, device), report=report)

    first, other = seen("host-tp0of2", "digest:1", "receipts:1"), seen("host-tp1of2", "receipts:1", "receipts:1")
    assert len(render([first, other])) == 3
    assert len(render([first, seen("host-tp1of2", "digest:2", "receipts:2", name="elsewhere")])) == 3
    alone = [seen(f"gpu-{gpu}-of-1", f"digest:{gpu}", f"receipts:{gpu}") for gpu in "ab"]
    assert len(render(alone)) == 3, "these are no ranks of one model"
    *_, line = render([first, seen("host-tp1of2", "digest:2", "receipts:2")])
    assert line.startswith("m: its ranks serve different versions: tp0of2 digest:1, tp1of2 digest:2; next step: ")


def test_an_engine_that_is_silent_is_named() -> None:
    heard = LeaseInfo(pid=1, uid=0, name="heard", age_s=90.0, silent_s=6.0)
    silent = LeaseInfo(pid=2, uid=0, name="silent", age_s=90.0, silent_s=75.0)
    [_, _, first, second] = lines(leases=(heard, silent), lease_count=2)
    assert first.endswith("lease of pid 1 (uid 0), 1m, heard")
    assert second.endswith("lease of pid 2 (uid 0), 1m, silent, not heard for 1m")


@pytest.mark.parametrize(
    ("state", "code"),
    [("ready", 0), ("updating", 0), ("starting", 1), ("adopting", 1), ("loading", 1), ("failed", 2), ("draining", 2)],
)
def test_the_exit_code_goes_by_the_state(state: str, code: int) -> None:
    assert exit_code([Seen(PLACE, report=READY.model_copy(update={"state": state}))]) == code
