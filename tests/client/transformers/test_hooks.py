"""What is put in place in Transformers is for one thread's block, and is gone after it, however the block ends."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import modeling_utils

from weightcached.client.transformers import weights_from_cache
from weightcached.client.transformers.hooks import FIND, LOAD, Found, reading
from weightcached.protocol.errors import BindError, DaemonAbsent, InvalidPlace, UnsupportedModel


def in_place() -> tuple[object, object]:
    return getattr(modeling_utils, FIND), inspect.getattr_static(modeling_utils.PreTrainedModel, LOAD)


ORIGINAL = in_place()


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    assert in_place() == ORIGINAL


@pytest.fixture
def llama(checkpoints: Callable) -> Path:
    directory: Path = checkpoints("llama-tied")[1]
    return directory


class Seen:
    """Lets everything through, and notes what came."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.loaded: list[str] = []
        self.warmed: list[Callable[[], None]] = []

    def find(self, asked: Mapping[str, Any], ask: Callable[[], Found]) -> Found:
        self.found.append(str(asked["pretrained_model_name_or_path"]))
        return ask()

    def load(self, call: inspect.BoundArguments, load: Callable[[], Any]) -> Any:
        self.loaded.append(type(call.arguments["model"]).__name__)
        return load()

    def warm(self, warm: Callable[[], None]) -> None:
        self.warmed.append(warm)
        warm()


def test_a_load_in_the_block_is_seen_and_one_after_it_is_not(llama: Path) -> None:
    seen = Seen()
    with reading(seen):
        assert in_place() != ORIGINAL
        transformers.AutoModelForCausalLM.from_pretrained(llama)
    transformers.AutoModel.from_pretrained(llama)
    assert (seen.found, seen.loaded) == ([str(llama)], ["LlamaForCausalLM"])


def test_other_threads_load_as_ever(llama: Path) -> None:
    seen, made = Seen(), []
    with reading(seen):
        other = threading.Thread(target=lambda: made.append(transformers.AutoModel.from_pretrained(llama)))
        other.start()
        other.join()
    assert len(made) == 1
    assert seen.found == []


def test_the_innermost_block_counts_and_the_outer_one_comes_back(llama: Path) -> None:
    outer, inner = Seen(), Seen()
    with reading(outer):
        with reading(inner):
            transformers.AutoModel.from_pretrained(llama)
        transformers.AutoModel.from_pretrained(llama)
    assert len(outer.found) == len(inner.found) == 1


def test_blocks_of_two_threads_that_overlap_do_not_end_each_other(llama: Path) -> None:
    seen, entered, leave = Seen(), threading.Event(), threading.Event()

    def hold() -> None:
        with reading(Seen()):
            entered.set()
            leave.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert entered.wait(30)
    with reading(seen):
        leave.set()
        other.join()
        transformers.AutoModel.from_pretrained(llama)
    assert len(seen.found) == 1


def test_blocks_of_two_tasks_that_overlap_keep_their_own_reader(llama: Path) -> None:
    first, second = Seen(), Seen()

    async def load(seen: Seen, before: asyncio.Event, told: asyncio.Event, after: asyncio.Event) -> None:
        with reading(seen):
            told.set()
            await before.wait()
            transformers.AutoModel.from_pretrained(llama)
        after.set()

    async def both() -> None:
        first_in, second_in, first_out, second_out = (asyncio.Event() for _ in range(4))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load(first, second_in, first_in, first_out))
            tasks.create_task(load(second, first_out, second_in, second_out))

    asyncio.run(both())
    assert (len(first.found), len(second.found)) == (1, 1)


def test_a_task_that_requires_weights_gets_none_from_disk_beside_one_without_the_cache(
    llama: Path, runtime_dir: Path
) -> None:
    async def without(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with weights_from_cache(mode="off"):
            transformers.AutoModel.from_pretrained(llama)
            entered.set()
            await leave.wait()

    async def requiring(entered: asyncio.Event, leave: asyncio.Event, other: asyncio.Task[None]) -> None:
        await entered.wait()
        with weights_from_cache(mode="require", runtime_dir=runtime_dir):
            leave.set()
            await other
            transformers.AutoModel.from_pretrained(llama)

    async def both() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(without(entered, leave))
        with pytest.raises(DaemonAbsent):
            await asyncio.create_task(requiring(entered, leave, other))

    asyncio.run(both())


def test_a_thread_that_has_the_context_of_a_block_loads_as_ever(llama: Path) -> None:
    seen = Seen()

    async def load() -> None:
        with reading(seen):
            await asyncio.to_thread(transformers.AutoModel.from_pretrained, llama)

    asyncio.run(load())
    assert seen.found == []


def test_a_task_that_outlives_the_block_it_was_started_in_loads_as_ever(llama: Path) -> None:
    seen = Seen()

    async def load(ended: asyncio.Event) -> None:
        await ended.wait()
        transformers.AutoModel.from_pretrained(llama)

    async def both() -> None:
        ended = asyncio.Event()
        with reading(seen):
            task = asyncio.create_task(load(ended))
        ended.set()
        await task

    asyncio.run(both())
    assert seen.found == []


def block_across_a_yield(seen: Seen) -> Iterator[None]:
    with reading(seen):
        yield


def test_blocks_of_two_generators_that_overlap_without_nesting_are_an_error_and_each_takes_out_itself(
    llama: Path,
) -> None:
    first, second = Seen(), Seen()
    one, other = block_across_a_yield(first), block_across_a_yield(second)
    next(one)
    next(other)
    with pytest.raises(BindError, match="not the innermost"):
        next(one)
    transformers.AutoModel.from_pretrained(llama)
    assert (len(first.found), len(second.found)) == (0, 1)
    with pytest.raises(StopIteration):
        next(other)


def test_a_block_that_is_left_in_another_context_than_its_own_is_an_error(llama: Path) -> None:
    seen = Seen()
    block = block_across_a_yield(seen)
    next(block)
    with pytest.raises(BindError, match="other than its own"):
        contextvars.Context().run(next, block)
    transformers.AutoModel.from_pretrained(llama)
    assert seen.found == []


def test_an_error_in_the_block_puts_everything_back(llama: Path, runtime_dir: Path) -> None:
    with pytest.raises(ZeroDivisionError), weights_from_cache(mode="off"):
        _ = 1 / 0
    (runtime_dir / "default").write_text("no folder")
    with pytest.raises(InvalidPlace), weights_from_cache(runtime_dir=runtime_dir):
        transformers.AutoModel.from_pretrained(llama)


def test_what_somebody_else_put_over_it_is_left_alone() -> None:
    with reading(Seen()):
        ours = getattr(modeling_utils, FIND)

        def theirs(*args: Any, **kwargs: Any) -> Found:
            found: Found = ours(*args, **kwargs)
            return found

        setattr(modeling_utils, FIND, theirs)
    assert getattr(modeling_utils, FIND) is theirs
    setattr(modeling_utils, FIND, ORIGINAL[0])


def test_a_block_in_which_nothing_is_loaded_is_an_error(llama: Path) -> None:
    with pytest.raises(BindError, match="no model was loaded"), weights_from_cache(mode="off"):
        pass
    with weights_from_cache(mode="off"):
        transformers.AutoModel.from_pretrained(llama)


@pytest.mark.parametrize("lacking", [FIND, LOAD])
def test_a_release_of_transformers_without_them_is_refused_by_its_version(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = modeling_utils if lacking == FIND else modeling_utils.PreTrainedModel
    with monkeypatch.context() as patched:
        patched.setattr(owner, lacking, staticmethod(lambda model: None) if lacking == LOAD else lambda name: None)
        with pytest.raises(UnsupportedModel) as caught, reading(Seen()):
            pass
    assert transformers.__version__ in str(caught.value)
    assert lacking in str(caught.value)
