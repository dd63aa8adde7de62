"""An engine of Transformers that follows its daemon: each answer is of exactly one generation, and of the latest."""

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fine_tuned import Generation, fine_tuned, generation_of
from tests.support.recipes import recipe_of
from weightcached.client import WeightSet, attach
from weightcached.client.engine import model as engine_model
from weightcached.client.engine.following import Following
from weightcached.client.engine.options import parse
from weightcached.client.engine.service import Service
from weightcached.client.swap import Swapped
from weightcached.client.transformers import from_pretrained, weights_of
from weightcached.client.transformers.switching import swap_in
from weightcached.protocol.messages import Event, Refused
from weightcached.protocol.places import Place, host_device
from weightcached.protocol.testing import AnswerSwitches, Gate, LyingDaemon, Receive, Send, Stall, Step

PROMPT = "weights"
TOKENS = 12
pytestmark = pytest.mark.timeout(300)  # the first test waits for two daemons and two engines


@pytest.fixture(scope="module")
def checkpoints(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny, fine_tuned(tiny, tmp_path_factory.mktemp("tuned") / "model")]


@pytest.fixture(scope="module")
def generations(checkpoints: list[Path]) -> Iterator[list[Generation]]:
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name,
        generation_of(checkpoints[0], Path(name) / "a") as first,
        generation_of(checkpoints[1], Path(name) / "b") as second,
    ):
        yield [first, second]


@pytest.fixture(scope="module")
def expected(checkpoints: list[Path]) -> list[tuple[int, ...]]:
    """The tokens of each generation, by an engine that loads it from disk."""
    answers = [tokens(service_of(path, None)) for path in checkpoints]
    assert answers[0] != answers[1]
    return answers


def service_of(directory: Path, weights: WeightSet | None) -> Service:
    recipe = recipe_of(directory)
    return Service(recipe, engine_model.load(recipe, weights, dtype="auto"), weights, mode="require")


def tokens(service: Service) -> tuple[int, ...]:
    return service.generate(PROMPT, max_new_tokens=TOKENS).token_ids


def place_in(runtime_dir: Path) -> Place:
    place = Place(runtime_dir, "default", host_device(tp_size=1, tp_rank=0))
    place.directory.mkdir(mode=0o755)
    return place


def published(generation: Generation) -> Send:
    message = generation.message
    return Send(Event(kind="published", generation=message.generation, message="", version=message.version))


class Watched:
    """The service's switch, with a word to the test when it was done."""

    def __init__(self, switch: Callable[..., Swapped]) -> None:
        self._switch = switch
        self.done = threading.Semaphore(0)

    def __call__(self, *words: object, **named: object) -> Swapped:
        try:
            return self._switch(*words, **named)
        finally:
            self.done.release()


@contextmanager
def followed(script: list[Step], checkpoint: Path, runtime_dir: Path) -> Iterator[tuple[Service, Watched, Following]]:
    """An engine with the weights of a daemon that follows ``script``, and whose switches are watched."""
    with (
        LyingDaemon(place_in(runtime_dir).socket_path, script),
        attach(checkpoint, mode="require", runtime_dir=runtime_dir, want="current") as weights,
    ):
        service = service_of(checkpoint, weights)
        follower = weights.follow()
        follower._unheard = False  # this daemon does not answer Status
        switch = Watched(service.switch_to)
        with Following(follower, switch) as following:
            yield service, switch, following


def test_tokens_are_those_of_the_generation_that_was_published(
    checkpoints: list[Path], generations: list[Generation], expected: list[tuple[int, ...]], runtime_dir: Path
) -> None:
    forward, back = Gate(), Gate()
    script: list[Step] = [Receive(), generations[0].step(), Stall(forward), published(generations[1]), Receive()]
    script += [generations[1].step(), Stall(back), published(generations[0]), AnswerSwitches(generations)]
    with (
        LyingDaemon(place_in(runtime_dir).socket_path, script) as daemon,
        attach(checkpoints[0], mode="require", runtime_dir=runtime_dir, want="current", heartbeat_s=60) as weights,
    ):
        service = service_of(checkpoints[0], weights)
        follower = weights.follow()
        follower._unheard = False  # this daemon does not answer Status
        switch = Watched(service.switch_to)
        pointers = [parameter.data_ptr() for parameter in service._module.parameters()]
        over: threading.Event = threading.Event()
        answers: queue.Queue[tuple[int, ...]] = queue.Queue()

        def ask_on() -> None:
            while not over.is_set():
                answers.put(tokens(service))

        def wait_for(wanted: tuple[int, ...]) -> None:
            while (answer := answers.get(timeout=60)) != wanted:
                assert answer in expected

        with Following(follower, switch) as service.following, ThreadPoolExecutor() as threads:
            asking = [threads.submit(ask_on) for _ in range(2)]
            try:
                wait_for(expected[0])
                for gate, wanted in ((forward, expected[1]), (back, expected[0])):
                    gate.open()
                    assert switch.done.acquire(timeout=60)
                    wait_for(wanted)
            finally:
                over.set()
            for each in asking:
                each.result(60)
            while not answers.empty():
                assert answers.get() in expected
        status = service.status()["weights"]
        assert [parameter.data_ptr() for parameter in service._module.parameters()] == pointers
        assert status["generation"] == generations[0].message.generation
        assert status["following"]["switches"] == 2
        assert status["following"]["from_version"] == generations[1].message.version
        assert status["following"]["error"] is None
        assert [type(message).__name__ for message in daemon.wires[0].messages] == ["Hello", "Switch", "Switch"]


def test_what_cannot_be_switched_to_is_said_and_the_weights_are_kept(
    checkpoints: list[Path], generations: list[Generation], expected: list[tuple[int, ...]], runtime_dir: Path
) -> None:
    tell = Gate()
    script: list[Step] = [Receive(), generations[0].step(), Stall(tell), published(generations[1])]
    script += [AnswerSwitches(generations[:1])]
    with followed(script, checkpoints[0], runtime_dir) as (service, switch, following):
        tell.open()
        assert switch.done.acquire(timeout=60)
        assert tokens(service) == expected[0]
    assert "not held here" in str(following.status()["error"])
    assert service.status()["weights"]["generation"] == generations[0].message.generation


def test_what_could_not_be_switched_to_just_then_is_tried_again(
    checkpoints: list[Path], generations: list[Generation], runtime_dir: Path
) -> None:
    tell = Gate()
    script: list[Step] = [Receive(), generations[0].step(), Stall(tell), published(generations[1]), Receive()]
    script += [Send(Refused(code="daemon_not_ready", message="it reads whether it may")), AnswerSwitches(generations)]
    with followed(script, checkpoints[0], runtime_dir) as (service, switch, following):
        tell.open()
        assert switch.done.acquire(timeout=60)
        assert switch.done.acquire(timeout=60)
    assert following.status()["error"] is None
    assert service.status()["weights"]["generation"] == generations[1].message.generation


def test_a_model_with_buffers_from_the_checkpoint_has_them_anew(
    checkpoints: list[Path], generations: list[Generation], runtime_dir: Path
) -> None:
    from transformers import LlamaForCausalLM

    script: list[Step] = [Receive(), generations[0].step(), AnswerSwitches(generations, current=generations[1])]
    options = {"mode": "require", "runtime_dir": runtime_dir, "want": "current"}
    with LyingDaemon(place_in(runtime_dir).socket_path, script):
        model = from_pretrained(LlamaForCausalLM, checkpoints[0], weight_cache=options)
        weights = weights_of(model)
        assert weights is not None
        norm = weights["model.norm.weight"]
        buffer = norm.clone()  # as a checkpoint's buffer would be, which no family of this size has
        from weightcached.client.transformers import switching

        switching.remember_copies(model, [(buffer, norm)])
        before = buffer.clone()
        with weights.stage() as staged, weights.barrier.stopped() as stopped:
            swap_in(model, weights, staged, stopped)
        assert buffer.equal(norm)
        assert not buffer.equal(before)
        weights.close()


def test_to_follow_is_an_option() -> None:
    assert not parse(["--model", "m"]).follow
    assert parse(["--model", "m", "--follow"]).follow
