"""Building an engine's state and copying it out: the bytes, the bracket around the files, and what the engine raises.

The adapters here are tiny and of this process; `tests/daemon/test_engine_made.py` has an installed one in a worker.
"""

import os

import pytest
import torch
from torch import nn

from tests.support.example_engine import toy_model
from tests.support.resources import anonymous_nbytes
from weightcached.loader.engines import source
from weightcached.loader.engines.source import build_state
from weightcached.protocol.config import build_config
from weightcached.protocol.engine_key import EngineKey
from weightcached.protocol.engines import Built, NamedTensor
from weightcached.protocol.errors import CheckpointChanged, EngineFailed, InsufficientMemory, UnsupportedModel
from weightcached.protocol.integrity import differing_rows
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host

KEY = EngineKey.of("toy", 1, {"version": "1"})
VERSIONS = {"generation": "0" * 32, "version": "v", "receipts_version": "r", "digest": None}


@pytest.fixture
def model(tmp_path):
    return toy_model(tmp_path / "model")


@pytest.fixture
def built_by(model, monkeypatch):
    """``built_by(build)``: the state of an adapter whose ``build`` is that function."""

    def built(build, key=KEY):
        class Adapter:
            name, revision = "toy", 1

            def build(self, request, progress):
                return build(request)

        monkeypatch.setattr(source, "find_adapter", lambda name: Adapter())
        monkeypatch.setattr(source, "engine_key", lambda name, request: key)
        config = build_config(model, layout="toy", engine=KEY, tp_size=1, tp_rank=0, dtype="float16")
        return build_state(os.fspath(model), config, ("--a",), also_trusted=(), progress=print)

    return built


def bytes_of(tensor):
    """Of its elements, in C order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def copied(state):
    """The segment's bytes and the manifest."""
    segment = host.allocate(state.segment_nbytes, name="test")
    told = []
    try:
        encode, seconds = state.copy(segment, lambda done, total: told.append((done, total)))
        host.seal(segment)  # nothing of it is mapped any more
        assert {"build", "copy"} <= seconds.keys()
        return os.pread(segment, state.segment_nbytes, 0), Manifest.decode(encode(**VERSIONS)), told
    finally:
        os.close(segment)


def test_the_adapter_is_asked_with_what_the_daemon_was_told(built_by, model):
    def build(request):
        assert (request.model_dir, request.dtype, request.arguments) == (model, "float16", ("--a",))
        assert request.parallel.tp_size == 1
        return Built()

    assert built_by(build).segment_nbytes == 0


def test_bytes_of_any_strides_come_out_as_they_went_in_and_gaps_are_zero(built_by):
    source = torch.arange(1, 25, dtype=torch.float64).reshape(4, 6)
    tensors = {
        "plain": source.clone(),
        "transposed": source.clone().t(),
        "columns": source.clone()[:, 1:3],
        "expanded": source.clone()[:, :1].expand(4, 5),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "eight bits": torch.arange(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
    }
    state = built_by(lambda _: Built(tensors=[NamedTensor(*one) for one in tensors.items()], scalars={"scale": 0.5}))
    data, manifest, told = copied(state)
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, tensor in tensors.items():
        row = manifest.row(name)
        assert (row.shape, row.stride) == (tuple(tensor.shape), tensor.stride())
        if row.nbytes:
            extent = whole[row.offset : row.offset + row.nbytes].view(tensor.dtype)
            found = extent.as_strided(row.shape, row.stride)
            assert bytes_of(found) == bytes_of(tensor), name
    columns = manifest.row("columns")
    gaps = whole[columns.offset : columns.offset + columns.nbytes].view(torch.float64)
    assert gaps[2:6].tolist() == [0.0] * 4  # what lay between the columns in the engine's memory is nobody's here
    assert differing_rows(manifest, [memoryview(data)]) == []
    assert manifest.meta.scalars == {"scale": 0.5}
    assert told[-1] == (state.content_nbytes, state.content_nbytes)


def test_files_that_change_while_the_engine_builds_fail_the_load(built_by, model):
    def build(request):
        with open(request.model_dir / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        return Built()

    with pytest.raises(CheckpointChanged):
        copied(built_by(build))


def test_a_file_that_takes_another_s_place_meanwhile_fails_the_load(built_by, model):
    def build(request):
        path = request.model_dir / "model.safetensors"
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        return Built()

    with pytest.raises(CheckpointChanged):
        copied(built_by(build))


class Unfilled(nn.Module):
    """What an engine has before it loads: one weight under two names, a bias with a start value, a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Linear(3, 2, bias=False)
        self.outer.weight = self.inner.weight
        self.inner.bias.data.fill_(-1)
        self.register_buffer("scale", torch.ones(()))


def filled_by(built_by, fill):
    module = Unfilled()

    def filling():
        with torch.no_grad():
            fill(module)
        return Built(module=module, scalars={"filled": True})

    data, manifest, _ = copied(built_by(lambda _: Built(module=module, fill=filling)))
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = {row.name: whole[row.offset : row.offset + row.nbytes].view(torch.float32).tolist() for row in manifest}
    assert manifest.meta.scalars == {"filled": True}
    assert differing_rows(manifest, [memoryview(data)]) == []
    assert manifest.row("outer.weight").alias_of == "inner.weight"
    return rows


def test_an_engine_may_load_into_the_segment_itself(built_by):
    def fill(module):
        assert "memfd:test" in area_of(module.inner.weight.data_ptr())
        assert module.inner.bias.tolist() == [-1, -1]
        module.inner.weight.copy_(torch.arange(6.0).reshape(2, 3))
        module.scale.mul_(4)

    rows = filled_by(built_by, fill)
    assert rows == {
        "inner.weight": [0, 1, 2, 3, 4, 5],
        "outer.weight": [0, 1, 2, 3, 4, 5],
        "inner.bias": [-1, -1],
        "scale": [4],
    }


def test_what_is_filled_in_the_segment_is_in_memory_once(built_by):
    nbytes = 256 << 20
    grown: list[int] = []

    def filling():
        module.weight.data.fill_(1)
        grown.append(anonymous_nbytes(os.getpid()) - before)
        return Built(module=module)

    before = anonymous_nbytes(os.getpid())
    module = nn.Linear(1 << 13, nbytes >> 15, bias=False, device="meta").to_empty(device="cpu")
    segment = host.allocate(nbytes, name="test")
    try:
        built_by(lambda _: Built(module=module, fill=filling)).copy(segment, lambda *_: None)
        assert os.fstat(segment).st_blocks * 512 >= nbytes
        assert grown[0] < nbytes // 4
    finally:
        os.close(segment)


def area_of(address):
    """The line of this process's memory map that ``address`` lies in."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(edge, 16) for edge in line.split()[0].split("-"))
            if low <= address < high:
                return line
    return ""


def test_what_leaves_its_place_while_it_is_filled_is_copied_to_it(built_by):
    def fill(module):
        module.inner.weight.data = torch.full((2, 3), 7.0)
        module.inner.bias = nn.Parameter(torch.tensor([5.0, 6.0]))

    rows = filled_by(built_by, fill)
    assert (rows["inner.weight"], rows["outer.weight"], rows["inner.bias"]) == ([7] * 6, [7] * 6, [5, 6])


@pytest.mark.parametrize(
    ("fill", "name"),
    [
        (lambda module: setattr(module.inner, "bias", None), "inner.bias"),
        (lambda module: setattr(module.inner, "bias", nn.Parameter(torch.zeros(3))), "inner.bias"),
        (lambda module: setattr(module.inner, "bias", nn.Parameter(torch.zeros(2).half())), "inner.bias"),
        (lambda module: setattr(module.outer, "weight", nn.Parameter(torch.zeros(2, 3))), "outer.weight"),
        (lambda module: module.register_buffer("late", torch.zeros(1)), "late"),
    ],
    ids=["gone", "another shape", "another dtype", "a tie undone", "new"],
)
def test_a_state_that_changes_its_form_while_it_is_filled_is_refused_by_name(built_by, fill, name):
    with pytest.raises(UnsupportedModel, match=name):
        filled_by(built_by, fill)


def test_what_is_raised_while_filling_is_the_engine_s_too(built_by):
    def fill(_):
        raise ValueError("out of luck")

    with pytest.raises(EngineFailed, match="out of luck"):
        filled_by(built_by, fill)


def test_what_is_returned_after_filling_is_a_state(built_by):
    state = built_by(lambda _: Built(fill=lambda: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(EngineFailed, match=r"fills the state of engine toy.*a Built.*NoneType"):
        copied(state)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "a Built.*NoneType"),
        ({"weight": torch.zeros(1)}, "a Built.*dict"),
        (Built(tensors=None), "tensors as a sequence"),  # type: ignore[arg-type]
        (Built(scalars=[1]), "scalars as a mapping"),  # type: ignore[arg-type]
        (Built(fill=1), "fill as a function"),  # type: ignore[arg-type]
    ],
    ids=["nothing", "a dict", "no tensors", "no mapping", "no function"],
)
def test_what_an_adapter_returns_that_is_no_state_is_its_failure(built_by, returned, said):
    with pytest.raises(EngineFailed, match=f"adapter of engine toy.*{said}"):
        built_by(lambda _: returned)


def test_an_engine_that_was_changed_beside_its_daemon_is_not_built(built_by):
    with pytest.raises(EngineFailed, match=r"version '1'.*version '2'"):
        built_by(lambda _: pytest.fail("built"), key=EngineKey.of("toy", 1, {"version": "2"}))


@pytest.mark.parametrize(
    "error", [kind("out of luck") for kind in (ValueError, SystemExit, KeyboardInterrupt, BaseException)], ids=repr
)
def test_what_an_engine_raises_is_reported_with_its_words_and_its_traceback(built_by, capfd, error):
    def build(_):
        raise error

    with pytest.raises(EngineFailed, match="out of luck"):
        built_by(build)
    assert "in build" in capfd.readouterr().err


def test_memory_that_an_engine_does_not_get_is_memory_that_is_lacking(built_by):
    """So it is tried again: another moment may have it."""

    def of_python(_):
        raise MemoryError

    for build in (of_python, lambda _: Built(tensors=[NamedTensor("huge", torch.empty(1 << 60))])):
        with pytest.raises(InsufficientMemory, match="toy"):
            built_by(build)


def test_an_error_of_ours_stays_what_it_is(built_by):
    def build(_):
        raise UnsupportedModel("layer 3 has an opaque handle")

    with pytest.raises(UnsupportedModel, match="layer 3"):
        built_by(build)
