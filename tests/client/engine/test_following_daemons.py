"""An engine as a process beside real daemons: whatever they publish, its tokens are those of the version that it says
it has, as an engine that loads that very checkpoint from disk says them.
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.client.engine.test_processes import PROMPT, TIMEOUT_S, Engine, engine, wait_lease
from tests.support.daemons import daemon, supervised_daemon
from tests.support.eventually import eventually
from tests.support.fine_tuned import fine_tuned
from tests.support.groups import kill_and_wait
from tests.support.plain import tensors_of
from tests.support.recipes import recipe_of
from weightcached.client.control import rollback, update
from weightcached.client.engine import model as engine_model
from weightcached.client.engine.service import Service
from weightcached.client.publish import publish

TOKENS = 12


@dataclass(frozen=True)
class Answered:
    """An answer, with the generation that the engine said it had, and how often it had switched, before and after."""

    tokens: tuple[int, ...]
    before: tuple[str, int]
    after: tuple[str, int]


def of_disk(directory: Path) -> tuple[int, ...]:
    """What an engine says that loads this checkpoint itself."""
    recipe = recipe_of(directory)
    service = Service(recipe, engine_model.load(recipe, None, dtype="auto"), None, mode="off")
    return service.generate(PROMPT, max_new_tokens=TOKENS).token_ids


@contextmanager
def asked_on(served: Engine) -> Iterator[Callable[[], Answered]]:
    """Two threads ask it for the length of the block; the answers, one after the other."""
    answers: queue.Queue[Answered | Exception] = queue.Queue()
    over = threading.Event()

    def standing() -> tuple[str, int]:
        weights: dict[str, Any] = served.ask("/status")["weights"]
        return weights["generation"], weights["following"]["switches"]

    def ask_on() -> None:
        try:
            before = standing()
            while not over.is_set():
                tokens = tuple(served.generate(TOKENS))
                answers.put(Answered(tokens, before, before := standing()))
        except Exception as error:  # noqa: BLE001 - raised to whoever takes the answers
            answers.put(error)

    def next_answer() -> Answered:
        answer = answers.get(timeout=TIMEOUT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    threads = [threading.Thread(target=ask_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield next_answer
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tokens_are_those_of_each_version_through_updates_rollbacks_pushes_and_a_killed_keeper(
    tiny: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    """Twice around, so that every model comes in more than one way: loaded, pushed, and gone back to."""
    a, b, c = tiny, fine_tuned(tiny, tmp_path / "b"), fine_tuned(tiny, tmp_path / "c", every=3)
    says = {model: of_disk(model) for model in (a, b, c)}
    assert len(set(says.values())) == 3
    where: dict[str, Any] = {"runtime_dir": runtime_dir}
    with (
        supervised_daemon(a, runtime_dir, script=None) as daemon,
        engine(a, runtime_dir, "--port", "0", "--follow", "--wait-for-daemon", "60", mode="require") as served,
    ):
        first = served.wait_ready()["weights"]["generation"]
        expected = {first: says[a]}
        with asked_on(served) as next_answer:

            def follows(model: Path, switches: int) -> None:
                """Every answer from now on is looked at, until some are wholly of what is published now: ``model``."""
                current = daemon.report().generation
                assert current is not None
                assert expected.setdefault(current, says[model]) == says[model]
                wholly_of_it = 0
                while wholly_of_it < 2:
                    answer = next_answer()
                    assert answer.tokens in (expected[answer.before[0]], expected[answer.after[0]])
                    assert answer.after[1] - answer.before[1] <= 1
                    wholly_of_it += answer.before == answer.after == (current, switches)

            def round_trip(loaded: Path, back_to: Path, pushed: Path, switches: int) -> None:
                update(loaded, **where)
                follows(loaded, switches + 1)
                rollback(**where)
                follows(back_to, switches + 2)
                publish(tensors_of(pushed), **where)
                follows(pushed, switches + 3)

            follows(a, 0)
            round_trip(b, a, c, 0)
            kill_and_wait(daemon)
            round_trip(a, c, b, 3)
        lease = wait_lease(served, "connected", resumes=1)
        assert lease["losses"] == 1
        status = served.ask("/status")["weights"]
        assert status["following"]["error"] is None
        assert served.end(signal.SIGTERM) == 0
        assert "Traceback" not in served.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_daemon_that_is_started_anew_without_a_vault_is_followed(
    tiny: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    """It serves its own checkpoint again, and then what it is updated to; the engine had gone on with neither."""
    b, c = fine_tuned(tiny, tmp_path / "b"), fine_tuned(tiny, tmp_path / "c", every=3)
    with daemon(tiny, runtime_dir) as first:
        first.wait_until("ready")
        with engine(tiny, runtime_dir, "--port", "0", "--follow", mode="require") as served:
            served.wait_ready()

            def follows(model: Path, current: str | None) -> None:
                eventually(lambda: served.ask("/status")["weights"]["generation"] == current)
                assert tuple(served.generate(TOKENS)) == of_disk(model)

            update(c, runtime_dir=runtime_dir)
            follows(c, first.report().generation)
            first.stop(signal.SIGKILL)
            wait_lease(served, "detached")
            with daemon(tiny, runtime_dir) as anew:
                follows(tiny, anew.wait_until("ready").generation)
                assert wait_lease(served, "connected", resumes=1)["obstacle"] is None
                update(b, runtime_dir=runtime_dir)
                follows(b, anew.report().generation)
            assert served.ask("/status")["weights"]["following"]["error"] is None
            assert served.end(signal.SIGTERM) == 0
            assert "Traceback" not in served.log.read_text()
