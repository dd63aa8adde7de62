import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcached.client.demo import processes
from weightcached.client.demo.processes import StepFailed, Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    with Workshop(tmp_path) as open_workshop:
        yield open_workshop


def test_a_childs_line_and_its_end(workshop: Workshop) -> None:
    child = workshop.python("child", "-c", "print('{\"a\": 1}', flush=True); print('{}')")
    assert child.json_line() == {"a": 1}
    assert child.json_line() == {}
    child.finish()


def test_a_child_that_ends_instead_of_answering_shows_its_log(workshop: Workshop) -> None:
    child = workshop.python("child", "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)")
    with pytest.raises(StepFailed, match=r"(?s)child ended with status 3.*the reason"):
        child.json_line()


def test_a_child_that_talks_nonsense_is_said(workshop: Workshop) -> None:
    with pytest.raises(StepFailed, match="instead of a line of JSON"):
        workshop.python("child", "-c", "print('hello')").json_line()


def test_a_child_that_says_nothing_is_not_waited_for_for_ever(workshop: Workshop) -> None:
    with pytest.raises(StepFailed, match="did not answer in time"):
        workshop.python("child", "-c", "import time; time.sleep(600)").json_line(timeout_s=0.2)


def test_output_needs_a_good_end(workshop: Workshop) -> None:
    assert workshop.python("child", "-c", "print('a'); print('b')").output() == "a\nb\n"
    with pytest.raises(StepFailed, match="ended with status 1, not 0"):
        workshop.python("child", "-c", "print('a'); raise SystemExit(1)").output()


def test_leaving_ends_every_child_even_one_that_will_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.2)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with Workshop(tmp_path) as workshop:
        children = [
            workshop.python("child", "-c", f"{first}; import time; print('{{}}', flush=True); time.sleep(600)")
            for first in ("pass", deaf)
        ]
        for child in children:
            child.json_line()
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_children_do_not_use_what_the_user_has_configured(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('WEIGHTCACHED')}))"
    )
    seen = workshop.python("child", "-c", program).json_line()
    assert seen["WEIGHTCACHED_RUNTIME_DIR"] == str(workshop.runtime_dir)
    assert seen["WEIGHTCACHED_CACHE_DIR"].startswith(str(workshop.folder))


def test_wait_ready_notices_a_daemon_that_cannot_start(workshop: Workshop) -> None:
    daemon = workshop.weightcached("daemon", "serve", "--model", str(workshop.folder), "--tp-size", "2", "--name", "x")
    with pytest.raises(StepFailed, match=r"(?s)ended before it was ready.*--tp-rank is required"):
        workshop.wait_ready(daemon, "x")
