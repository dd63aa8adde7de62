"""Good checkpoints: what is read from them, through which descriptors, and how fast."""

import gc
import json
import os

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from tests.support.checkpoints import RawTensor, make_checkpoint, tiny_llama, write_checkpoint, write_safetensors
from tests.support.costs import costs_at_most
from weightcached.loader.checkpoint import TensorHeader, open_checkpoint
from weightcached.loader.headers import PREFIX_BYTES, parse_header
from weightcached.protocol.content import take_receipts
from weightcached.protocol.dtypes import DTYPES
from weightcached.protocol.errors import HeaderError


def test_every_tensor_is_found_with_its_place(tmp_path):
    directory = make_checkpoint(tmp_path, "llama-sharded")
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.directory == directory
        assert checkpoint.config == json.loads((directory / "config.json").read_text())
        assert len({tensor.file for tensor in checkpoint.tensors.values()}) > 1
        for name, tensor in checkpoint.tensors.items():
            with safetensors.safe_open(directory / tensor.file, framework="pt") as theirs:
                value = theirs.get_tensor(name)
            assert (tensor.name, tensor.shape) == (name, tuple(value.shape))
            assert tensor.dtype == str(value.dtype).removeprefix("torch.")
            ours = os.pread(checkpoint.files[tensor.file], tensor.nbytes, tensor.offset)
            assert ours == value.view(dtype=torch.uint8).numpy().tobytes()


def test_tensors_of_a_file_written_by_the_library(tmp_path):
    arrays: dict[str, np.ndarray] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "flag": np.array([True, False]),
    }
    write_checkpoint(tmp_path, {"architectures": ["Any"]}, {})
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.metadata == {"model.safetensors": {"format": "np"}}
        for name, array in arrays.items():
            tensor = checkpoint.tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.nbytes) == (array.dtype.name, array.shape, array.nbytes)
            assert os.pread(checkpoint.files[tensor.file], tensor.nbytes, tensor.offset) == array.tobytes()


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_every_dtype_of_the_table_is_read(tmp_path, row):
    tensor = RawTensor(row.code, (3, 5), bytes(15 * row.itemsize_bytes))
    write_checkpoint(tmp_path, {}, {"model.safetensors": {"t": tensor}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["t"].dtype == row.name
        assert checkpoint.tensors["t"].nbytes == 15 * row.itemsize_bytes


def test_the_table_of_dtypes_is_the_library_s():
    assert {row.code: row.itemsize_bytes for row in DTYPES.values()} == {
        code: len(entry["data"])
        for code in [row.code for row in DTYPES.values()]
        for _, entry in safetensors.deserialize(_one_element(code))
    }


def _one_element(code: str) -> bytes:
    nbytes = next(row.itemsize_bytes for row in DTYPES.values() if row.code == code)
    header = json.dumps({"t": {"dtype": code, "shape": [1], "data_offsets": [0, nbytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


def test_tensors_may_stand_in_any_order_in_the_header(tmp_path):
    tensors = {name: RawTensor("U8", (4,), name.encode() * 4) for name in "abc"}
    write_checkpoint(tmp_path, {}, {"model.safetensors": tensors})

    def reverse(header):
        entries = list(header.items())
        header.clear()
        header.update(reversed(entries))

    write_safetensors(tmp_path / "model.safetensors", tensors, edit_header=reverse)
    with open_checkpoint(tmp_path) as checkpoint:
        for name in "abc":
            tensor = checkpoint.tensors[name]
            assert os.pread(checkpoint.files[tensor.file], 4, tensor.offset) == name.encode() * 4


def test_a_file_without_tensors_is_read(tmp_path):
    write_checkpoint(tmp_path, {}, {"model.safetensors": {}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors == {}


def test_the_descriptors_stay_with_the_files_that_were_opened(tmp_path):
    directory = tiny_llama(tmp_path, shards=2)
    with open_checkpoint(directory) as checkpoint:
        before = take_receipts(checkpoint.files)
        names = set(checkpoint.files)
        tensor = checkpoint.tensors["model.norm.weight"]
        expected = os.pread(checkpoint.files[tensor.file], tensor.nbytes, tensor.offset)
        os.rename(directory / tensor.file, directory / "aside")
        (directory / tensor.file).write_bytes(b"another file")
        assert os.pread(checkpoint.files[tensor.file], tensor.nbytes, tensor.offset) == expected
        assert [entry.inode for entry in take_receipts(checkpoint.files).entries] == [e.inode for e in before.entries]
    assert names == {entry.name for entry in before.entries}
    assert "model.safetensors.index.json" in names


def test_closing_closes_every_descriptor(tmp_path):
    directory = tiny_llama(tmp_path, shards=3)
    before = sorted(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(directory)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    checkpoint.close()
    checkpoint.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_other_weight_files_are_ignored_with_a_reason(tmp_path):
    directory = tiny_llama(tmp_path, shards=2)
    (directory / "consolidated.safetensors").write_bytes(b"not even one")
    with open_checkpoint(directory) as checkpoint:
        assert set(checkpoint.ignored_files) == {"consolidated.safetensors"}
        assert "index" in checkpoint.ignored_files["consolidated.safetensors"]


def test_a_header_of_100_000_tensors_costs_a_few_times_what_its_json_does():
    """Of processor time. What it takes on this machine: `make bench BENCH_ARGS=plan`."""
    entries = {
        f"model.layers.{i // 10}.part{i % 10}.weight": {
            "dtype": "BF16",
            "shape": [16, 8],
            "data_offsets": [256 * i, 256 * (i + 1)],
        }
        for i in range(100_000)
    }
    raw = json.dumps(entries).encode()
    file_nbytes = PREFIX_BYTES + len(raw) + 256 * 100_000
    assert costs_at_most(4, lambda: parse_header(raw, file="f", file_nbytes=file_nbytes), of=lambda: json.loads(raw))
    header = parse_header(raw, file="f", file_nbytes=file_nbytes)
    last = header.tensors[-1]
    assert last == TensorHeader("model.layers.9999.part9.weight", "bfloat16", (16, 8), "f", file_nbytes - 256, 256)
    assert len(header.tensors) == 100_000


@pytest.mark.parametrize("on", [True, False])
def test_parsing_leaves_the_garbage_collector_as_it_was(on):
    was_on = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        parse_header(b"{}", file="f", file_nbytes=10)
        assert gc.isenabled() is on
        with pytest.raises(HeaderError):
            parse_header(b"{]", file="f", file_nbytes=10)
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_headers_of_all_files_together_have_a_limit(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path, "llama-sharded")
    files = sorted(directory.glob("*.safetensors"))
    sizes = [int.from_bytes(file.read_bytes()[:PREFIX_BYTES], "little") for file in files]
    monkeypatch.setattr("weightcached.loader.checkpoint.HEADERS_LIMIT_BYTES", sum(sizes))
    open_checkpoint(directory).close()
    monkeypatch.setattr("weightcached.loader.checkpoint.HEADERS_LIMIT_BYTES", sum(sizes) - 1)
    with pytest.raises(HeaderError, match="too large together") as caught:
        open_checkpoint(directory)
    assert caught.value.where == str(files[-1])
