"""Every fault that a checkpoint is likely to have, planted one by one in one that is whole: each is an error that names
the file and, where there is one, the tensor, and nothing comes to the point of being published.

The ways in which one header can lie are in `test_checkpoint_faults.py`; here is what goes wrong with a checkpoint as a
whole, from its files' rights to values that cannot be quantized, through the very steps of a worker.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import INDEX, RawTensor, raw_tensor, tiny_config, tiny_llama, tiny_shapes
from tests.support.checkpoints import write_checkpoint as write
from tests.support.unprivileged import NOBODY, command_as, folder_for_everyone
from weightcached.loader.sources import source_of
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import ERRORS_BY_CODE, CheckpointError, WeightCacheError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.worker_messages import Job

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
UP = "model.layers.1.mlp.up_proj.weight"


def loaded(directory: Path, **options: Any) -> bytes:
    """What a worker does with a job: the manifest that would be published. Whatever fails leaves no descriptor."""
    config = build_config(directory, **{"layout": "fused", "tp_size": 1, "tp_rank": 0, **options})
    job = Job(model_dir=str(directory), config=config.model_dump(), generation="1" * 32, keeper_pid=os.getpid())
    with source_of(job, config, OwnedFds(), print) as source:
        source.planned()
        with OwnedFds([host.allocate(*source.segments_nbytes, name="test")]) as memory:
            filled = source.fill(memory[0], lambda done, total: None)
            host.seal(memory[0])
            return filled.encode(generation="1" * 32, version="v", receipts_version="v", digest=None)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "m", code="F32", shards=3)


def file_of(directory: Path, tensor: str) -> str:
    index: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return index[tensor]


def tensors_of(directory: Path) -> dict[str, dict[str, RawTensor]]:
    """File → its tensors, to be written again."""
    files: dict[str, dict[str, RawTensor]] = {}
    for name, shape in tiny_shapes(tiny_config()).items():
        files.setdefault(file_of(directory, name), {})[name] = raw_tensor(name, shape, "F32")
    return files


def rewritten(directory: Path, change: Callable[[dict[str, dict[str, RawTensor]]], object], **config: Any) -> None:
    """The same checkpoint with its tensors changed, and an index that agrees."""
    files = tensors_of(directory)
    change(files)
    write(directory, tiny_config(**config), files)


def cut_off(directory: Path) -> None:
    os.truncate(directory / SECOND, (directory / SECOND).stat().st_size - 4)


def grown(directory: Path) -> None:
    with open(directory / SECOND, "ab") as file:
        file.write(b"more")


def missing(directory: Path) -> None:
    (directory / THIRD).unlink()


def twice(directory: Path) -> None:
    index = (directory / INDEX).read_text()
    other = next(name for name in (FIRST, SECOND) if name != file_of(directory, UP))
    rewritten(directory, lambda files: files[other].update({UP: raw_tensor(UP, (48, 32), "F32")}))
    (directory / INDEX).write_text(index)


def extra(directory: Path) -> None:
    rewritten(directory, lambda files: files[SECOND].update(stray=raw_tensor("stray", (2,), "F32")))


def left_out(directory: Path) -> None:
    file = file_of(directory, UP)
    rewritten(directory, lambda files: files[file].pop(UP))


def wrong_shape(directory: Path) -> None:
    file = file_of(directory, UP)
    rewritten(directory, lambda files: files[file].update({UP: raw_tensor(UP, (47, 32), "F32")}))


def wrong_dtype(directory: Path) -> None:
    file = file_of(directory, UP)
    rewritten(directory, lambda files: files[file].update({UP: raw_tensor(UP, (48, 32), "F16")}))


def fewer_layers_stated(directory: Path) -> None:
    rewritten(directory, lambda files: None, num_hidden_layers=1)


def more_layers_stated(directory: Path) -> None:
    rewritten(directory, lambda files: None, num_hidden_layers=3)


def not_a_number(directory: Path) -> None:
    file = file_of(directory, UP)
    values = np.frombuffer(raw_tensor(UP, (48, 32), "F32").data, np.float32).copy()
    values[100] = np.nan
    rewritten(directory, lambda files: files[file].update({UP: RawTensor("F32", (48, 32), values.tobytes())}))


def only_pickles(directory: Path) -> None:
    for name in (FIRST, SECOND, THIRD):
        (directory / name).rename(directory / f"{name}.bin")
    (directory / INDEX).unlink()


def index_of_pickles(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {UP: "pytorch_model.bin"}}))


def several_without_index(directory: Path) -> None:
    (directory / INDEX).unlink()


def link_to_itself(name: str) -> Callable[[Path], None]:
    def plant(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(name)

    return plant


def links_in_a_circle(directory: Path) -> None:
    (directory / SECOND).unlink()
    (directory / SECOND).symlink_to("other")
    (directory / "other").symlink_to(SECOND)


def a_folder_of_links_to_itself(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.symlink_to(directory.name)


def a_directory_as_weights(directory: Path) -> None:
    (directory / SECOND).unlink()
    (directory / SECOND).mkdir()


def config_that_is_not_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


LOOP = "Too many levels of symbolic links"
FAULTS: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
    "a file that is cut off": (cut_off, "truncated_file", (SECOND, "truncated")),
    "bytes after the last tensor": (grown, "truncated_file", (SECOND, "left over")),
    "a missing shard": (missing, "missing_shard", (THIRD,)),
    "a tensor in two files": (twice, "duplicate_tensor", (UP, "two files")),
    "a tensor more": (extra, "unexpected_tensor", ("stray", SECOND)),
    "a tensor less": (left_out, "missing_tensor", (UP,)),
    "another shape": (wrong_shape, "shape_mismatch", (UP, "[48, 32]", "[47, 32]")),
    "another dtype than its neighbour": (wrong_dtype, "unsupported_model", (UP, "float16")),
    "fewer layers stated": (fewer_layers_stated, "unexpected_tensor", ("says 1 layers", "have 2", "layers.1.")),
    "more layers stated": (more_layers_stated, "missing_tensor", ("says 3 layers", "have 2", "layers.2.")),
    "a value that cannot be quantized": (not_a_number, "unusable_value", (UP, "NaN", "not finite")),
    "only pickle files": (only_pickles, "pickle_refused", (f"{FIRST}.bin",)),
    "an index of pickle files": (index_of_pickles, "pickle_refused", ("pytorch_model.bin",)),
    "several files and no index": (several_without_index, "bad_index", (FIRST, SECOND)),
    "weights that link to themselves": (link_to_itself(SECOND), "checkpoint", (SECOND, LOOP)),
    "weights that link in a circle": (links_in_a_circle, "checkpoint", (SECOND, LOOP)),
    "an index that links to itself": (link_to_itself(INDEX), "checkpoint", (INDEX, LOOP)),
    "a config that links to itself": (link_to_itself("config.json"), "bad_model_config", ("config.json", LOOP)),
    "a folder that links to itself": (a_folder_of_links_to_itself, "bad_model_config", ("config.json", LOOP)),
    "a folder in place of weights": (a_directory_as_weights, "missing_shard", (SECOND, "file type 'd'")),
    "a config that is not JSON": (config_that_is_not_json, "bad_model_config", ("config.json",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_before_anything_is_published(whole: Path, fault: str) -> None:
    plant, code, needles = FAULTS[fault]
    plant(whole)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightCacheError) as caught:
        loaded(whole, quantization="fp8")
    assert type(caught.value) is ERRORS_BY_CODE[code], caught.value
    for needle in needles:
        assert needle in str(caught.value)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_without_a_fault_it_is_loaded(whole: Path) -> None:
    assert loaded(whole, quantization="fp8")


def test_a_file_rewritten_while_it_is_read_is_named(whole: Path) -> None:
    """By whoever writes in place: the size stays, and half of it was read before."""
    config = build_config(whole, layout="fused", tp_size=1, tp_rank=0)
    job = Job(model_dir=str(whole), config=config.model_dump(), generation="1" * 32, keeper_pid=os.getpid())

    def rewrite(done: int, total: int) -> None:
        with open(whole / SECOND, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")

    with (
        source_of(job, config, OwnedFds(), print) as source,
        OwnedFds([host.allocate(*source.segments_nbytes, name="test")]) as memory,
        pytest.raises(CheckpointError) as caught,
    ):
        source.fill(memory[0], rewrite)
    assert caught.value.code == "checkpoint_changed"
    assert SECOND in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("name", "code"), [(SECOND, "checkpoint"), (INDEX, "checkpoint"), ("config.json", "bad_model_config")]
)
def test_what_may_not_be_read_is_named(name: str, code: str) -> None:
    """To a user without rights, who is the only one that rights mean anything to."""
    with folder_for_everyone() as folder:
        directory = tiny_llama(folder / "m", shards=3)
        (directory / name).chmod(stat.S_IRUSR)
        words = [sys.executable, "-P", "-m", "weightcached.daemon", "plan", str(directory), "--json"]
        ended = subprocess.run(command_as(NOBODY, words), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    error = json.loads(ended.stdout)["error"]
    assert error["code"] == code
    assert error["where"].endswith(name)
    assert "Permission denied" in error["found"]
