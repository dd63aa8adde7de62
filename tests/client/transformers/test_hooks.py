"""What is put in place in Transformers is for one thread's block, and is gone after it, however the block ends."""

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
from weightcached.protocol.errors import BindError, InvalidPlace, UnsupportedModel


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

    def find(self, asked: Mapping[str, Any], ask: Callable[[], Found]) -> Found:
        self.found.append(str(asked["pretrained_model_name_or_path"]))
        return ask()

    def load(self, call: inspect.BoundArguments, load: Callable[[], Any]) -> Any:
        self.loaded.append(type(call.arguments["model"]).__name__)
        return load()


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
