"""The executor with real files and real memory: bytes, digests, padding, counts, failures."""

import errno
import json
import os
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.benchmarks.page_cache import PAGE_BYTES, NotCold, make_cold, resident_pages
from tests.support import naive
from tests.support.checkpoints import (
    ORACLE,
    ORACLE_CASES,
    RawTensor,
    make_checkpoint,
    raw_tensor,
    tiny_llama,
    write_checkpoint,
)
from tests.support.execution import load, resident, segment_of
from tests.support.resources import nothing_left_behind
from weightcached.loader import execute as execute_module
from weightcached.loader import pipeline
from weightcached.loader.accounting import account
from weightcached.loader.boxes import Box, whole
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.execute import execute
from weightcached.loader.layout import place
from weightcached.loader.planned import Copy, LoadPlan, PlannedParameter
from weightcached.loader.reading import ALONE_NBYTES
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import CheckpointChanged, CheckpointError, InsufficientMemory, TruncatedFile
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host, large_pages


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", ORACLE_CASES)
def test_every_rank_of_the_oracle_byte_for_byte(tmp_path, case, size):
    directory = make_checkpoint(tmp_path / case, case)
    listed = json.loads((ORACLE / case / f"tp{size}.json").read_text())
    for rank in range(size):
        outcome = load(directory, layout="fused", tp_size=size, tp_rank=rank)
        arrays = {name: outcome.array(name) for name, row in outcome.rows.items() if row.alias_of is None}
        digests = naive.short_digests(arrays)
        ours = {name: [outcome.rows[name].dtype, list(array.shape), digests[name]] for name, array in arrays.items()}
        assert ours == listed[str(rank)]["parameters"]
        aliases = {name: row.alias_of for name, row in outcome.rows.items() if row.alias_of is not None}
        assert aliases == listed[str(rank)]["aliases"]
        for alias, target in aliases.items():
            assert outcome.rows[alias].offset == outcome.rows[target].offset
            assert outcome.rows[alias].digest == outcome.rows[target].digest


@pytest.mark.parametrize("case", ["mixtral", "phi3", "llama-sharded"])
def test_layout_hf_is_the_file_itself(tmp_path, case):
    directory = make_checkpoint(tmp_path / case, case)
    outcome = load(directory, layout="hf", tp_size=1, tp_rank=0)
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert {name: array.tobytes() for name, array in wanted.items()} == outcome.data


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([1, 2, 4]),
    slab_nbytes=st.integers(1, 3000),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(["auto", "float32", "float16"]),
    expendable=st.booleans(),
    data=st.data(),
)
def test_slabs_threads_casts_and_mappings_change_nothing(tmp_path, size, slab_nbytes, threads, dtype, expendable, data):
    code = data.draw(st.sampled_from(["BF16", "F32"]))
    directory = tiny_llama(tmp_path / code, code=code, vocab_size=70, tie_word_embeddings=True)
    config = build_config(
        directory, layout="fused", tp_size=size, tp_rank=data.draw(st.integers(0, size - 1)), dtype=dtype
    )
    with open_checkpoint(directory) as checkpoint:
        prepared = pipeline.prepare(checkpoint, config)
        with segment_of(prepared.placement.nbytes) as segment:
            executed = execute(
                prepared.placement,
                checkpoint.files,
                segment,
                threads=threads,
                slab_nbytes=slab_nbytes,
                expendable=expendable,
            )
            got = resident(segment, prepared.placement)
    wanted = naive.execute(prepared.plan, directory)
    assert got == {name: array.tobytes() for name, array in wanted.items()}
    assert executed.digests == {name: xxhash.xxh3_128(array.tobytes()).digest() for name, array in wanted.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "hf", "tp_size": 1, "tp_rank": 0},
        {"layout": "fused", "tp_size": 2, "tp_rank": 1},
        {"layout": "fused", "tp_size": 1, "tp_rank": 0, "dtype": "float16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("give_up", [False, True])
def test_a_segment_of_large_pages_or_of_some_holds_the_same(tmp_path, monkeypatch, caplog, options, give_up):
    """Slabs are read right into large pages, through a buffer into small ones, and the two may meet in a parameter."""
    monkeypatch.setattr(large_pages, "SLOW_STRETCH_S", 0.0 if give_up else 60.0)
    monkeypatch.setattr(large_pages, "STRETCH_NBYTES", host.LARGE_PAGE_NBYTES)
    caplog.set_level("INFO")
    directory = tiny_llama(tmp_path / "model", hidden_size=512, intermediate_size=1030, vocab_size=9000, head_dim=128)
    outcome = load(directory, **options)
    wanted = naive.execute(outcome.prepared.plan, directory)
    assert outcome.data == {name: array.tobytes() for name, array in wanted.items()}
    if "large pages: 0 of" in caplog.text:
        pytest.skip(f"this kernel makes no large pages here: {caplog.messages[-1]}")


def assembled(directory, tensors, parameters, **options):
    """Execute hand-made parameters over ``tensors``; (executed, name → bytes, name → what numpy makes of them)."""
    write_checkpoint(directory, {"architectures": ["Any"]}, {"model.safetensors": tensors})
    with open_checkpoint(directory) as checkpoint:
        made = tuple(parameters(checkpoint.tensors))
        config = build_config(directory, layout="hf", tp_size=1, tp_rank=0)
        plan = LoadPlan(config, made, account(expected=(), present=(), ignored={}))
        placement = place(plan)
        with segment_of(placement.nbytes) as segment:
            executed = execute(placement, checkpoint.files, segment, **options)
            return executed, resident(segment, placement), naive.execute(plan, directory)


@pytest.mark.parametrize("columns", [64, ALONE_NBYTES // 2])
def test_small_pieces_are_read_with_their_gaps_and_large_ones_alone(tmp_path, columns):
    rows = 700  # more than one system call's worth of small pieces
    tensors = {"t": raw_tensor("t", (rows, 4 * columns))}

    def rank_2_of_4(headers):
        source = Box((0, 2 * columns), (rows, columns))
        copies = (Copy(headers["t"], source, whole((rows, columns))),)
        yield PlannedParameter("p", (rows, columns), "bfloat16", "bfloat16", copies, part_kind="row")

    executed, got, wanted = assembled(tmp_path, tensors, rank_2_of_4)
    assert got["p"] == wanted["p"].tobytes()
    kept = rows * columns * 2
    assert executed.traffic["row"].kept == kept
    if columns * 2 >= ALONE_NBYTES:
        assert executed.traffic["row"].read == kept
    else:
        assert 3.9 * kept < executed.traffic["row"].read < 4 * kept


@pytest.mark.parametrize("transposed", [False, True])
def test_of_cached_files_only_the_wanted_pieces_are_touched_where_mappings_may_be_used(tmp_path, transposed):
    rows, columns = 700, 64
    tensors = {"t": raw_tensor("t", (rows, 4 * columns))}

    def rank_2_of_4(headers):
        source = Box((0, 2 * columns), (rows, columns))
        shape = (columns, rows) if transposed else (rows, columns)
        copies = (Copy(headers["t"], source, whole(shape), transposed),)
        yield PlannedParameter("p", shape, "bfloat16", "bfloat16", copies, part_kind="row")

    executed, got, wanted = assembled(tmp_path, tensors, rank_2_of_4, expendable=True)
    assert got["p"] == wanted["p"].tobytes()
    assert executed.traffic["row"].read == executed.traffic["row"].kept == rows * columns * 2


def test_parts_beside_each_other_and_padding_among_them(tmp_path):
    """Destinations that are not one range of the parameter: columns from two tensors, stacked, with a zeroed column."""
    tensors = {"a": raw_tensor("a", (40, 30)), "b": raw_tensor("b", (40, 9))}

    def stacked(headers):
        copies = (
            Copy(headers["a"], Box((0, 3), (40, 20)), Box((1, 0, 0), (1, 40, 20))),
            Copy(headers["b"], whole((40, 9)), Box((1, 0, 21), (1, 40, 9))),
            Copy(headers["a"], whole((40, 30)), Box((0, 0, 0), (1, 40, 30))),
        )
        yield PlannedParameter("p", (2, 40, 30), "bfloat16", "bfloat16", copies, zeros=(Box((1, 0, 20), (1, 40, 1)),))

    _, got, wanted = assembled(tmp_path, tensors, stacked)
    assert got["p"] == wanted["p"].tobytes()


def test_scalars_empty_tensors_and_all_padding(tmp_path):
    tensors = {"s": raw_tensor("s", (), "F32"), "e": RawTensor("F32", (0, 3), b"")}

    def made(headers):
        yield PlannedParameter("s", (), "float32", "float32", (Copy(headers["s"], whole(()), whole(())),))
        yield PlannedParameter("e", (0, 3), "float32", None, ())
        yield PlannedParameter("z", (70_000, 5), "int64", None, (), zeros=(whole((70_000, 5)),))

    executed, got, wanted = assembled(tmp_path, tensors, made)
    assert got == {name: array.tobytes() for name, array in wanted.items()}
    assert executed.digests["e"] == xxhash.xxh3_128(b"").digest()
    assert got["z"] == bytes(70_000 * 5 * 8)


def test_no_more_is_read_than_is_kept_where_parts_are_rows(tmp_path):
    directory = tiny_llama(tmp_path, vocab_size=512, hidden_size=64)
    for rank in range(2):
        figures = load(directory, layout="fused", tp_size=2, tp_rank=rank).loaded.figures
        for kind in ("column", "vocabulary", "replicated"):
            assert figures.traffic[kind].read == figures.traffic[kind].kept == figures.requested[kind] > 0
        row = figures.traffic["row"]
        assert row.kept < row.read <= figures.requested["row"] <= 2 * row.kept
        assert figures.bytes_read == sum(traffic.read for traffic in figures.traffic.values())


def test_the_page_cache_is_filled_with_what_this_rank_reads_and_no_more(tmp_path):
    """The kernel's readahead, left to itself, would go on into the next rank's rows."""
    directory = write_checkpoint(
        tmp_path, {"architectures": ["Any"]}, {"model.safetensors": {"t": raw_tensor("t", (64 << 10, 128))}}
    )
    path = directory / "model.safetensors"
    with open_checkpoint(directory) as checkpoint:
        header = checkpoint.tensors["t"]
        source = Box((0, 0), (16 << 10, 128))
        parameter = PlannedParameter(
            "p", source.shape, "bfloat16", "bfloat16", (Copy(header, source, whole(source.shape)),)
        )
        config = build_config(directory, layout="hf", tp_size=1, tp_rank=0)
        placement = place(LoadPlan(config, (parameter,), account(expected=(), present=(), ignored={})))
        try:
            make_cold([path], tolerated=0.0)
        except NotCold:
            pytest.skip("this file system does not let go of pages")
        with segment_of(placement.nbytes) as segment:
            execute(placement, checkpoint.files, segment)
        kept = placement.nbytes
        cached = sum(resident_pages(path)) * PAGE_BYTES
    assert kept <= cached <= kept + 2 * PAGE_BYTES


@pytest.fixture
def opened(tmp_path):
    """(checkpoint, prepared) of a few MiB, so that there are several slabs and threads."""
    directory = tiny_llama(tmp_path, hidden_size=256, vocab_size=8192)
    with open_checkpoint(directory) as checkpoint:
        config = build_config(directory, layout="fused", tp_size=1, tp_rank=0)
        yield checkpoint, pipeline.prepare(checkpoint, config)


def test_a_file_that_becomes_shorter_is_truncated_by_name(opened):
    checkpoint, prepared = opened
    last = max(checkpoint.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(checkpoint.directory / last.file, last.offset + last.nbytes - 1)
    with (
        segment_of(prepared.placement.nbytes) as segment,
        nothing_left_behind(),
        pytest.raises(TruncatedFile) as caught,
    ):
        execute(prepared.placement, checkpoint.files, segment)
    assert last.name in caught.value.message
    assert caught.value.where == last.file


def test_whoever_leaves_a_checkpoint_by_an_error_of_a_file_is_told_its_directory(tmp_path):
    """As the keeper is by its worker, and the user by the keeper."""
    directory = tiny_llama(tmp_path)
    file = directory / "model.safetensors"

    def load() -> None:
        with open_checkpoint(directory) as checkpoint:
            prepared = pipeline.prepare(checkpoint, build_config(directory, layout="fused", tp_size=1, tp_rank=0))
            os.truncate(file, file.stat().st_size - 1)
            with segment_of(prepared.placement.nbytes) as segment:
                execute(prepared.placement, checkpoint.files, segment)

    with pytest.raises(TruncatedFile) as caught:
        load()
    assert caught.value.where == str(file)


def test_a_file_that_cannot_be_read_is_named(opened):
    checkpoint, prepared = opened
    with (
        open(checkpoint.directory / "model.safetensors", "ab") as unreadable,
        segment_of(prepared.placement.nbytes) as segment,
        nothing_left_behind(),
        pytest.raises(CheckpointError, match="cannot be read") as caught,
    ):
        execute(prepared.placement, {"model.safetensors": unreadable.fileno()}, segment)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EBADF
    assert "model.safetensors" in str(caught.value.where)
    assert any(repr(name) in caught.value.message for name in checkpoint.tensors)


def test_a_segment_without_room_is_insufficient_memory(opened):
    checkpoint, prepared = opened
    with open("/dev/full", "wb", buffering=0) as full, nothing_left_behind(), pytest.raises(InsufficientMemory):
        execute(prepared.placement, checkpoint.files, full.fileno())


def test_what_the_progress_callback_raises_ends_every_thread(opened):
    checkpoint, prepared = opened

    def gone(done, total):
        raise ConnectionError("nobody listens")

    with (
        segment_of(prepared.placement.nbytes) as segment,
        nothing_left_behind(),
        pytest.raises(ConnectionError, match="nobody listens"),
    ):
        execute(prepared.placement, checkpoint.files, segment, threads=4, progress=gone)


@pytest.mark.parametrize("quantization", ["none", "fp8-tensor"])
def test_runs_become_shorter_towards_the_end_so_that_threads_end_together(tmp_path, monkeypatch, quantization):
    """What is read once and measured comes a second time, which is no more to read."""
    directory = tiny_llama(tmp_path, hidden_size=256, vocab_size=8192)
    threads, slab_nbytes, runs = 4, 32 << 10, []
    claimed = execute_module._Team._next_run

    def seen(team):
        left_nbytes, run = team._left_nbytes, claimed(team)
        runs.append((left_nbytes, run, sum(slab.source_nbytes for slab in run if slab.reads)))
        return run

    monkeypatch.setattr(execute_module._Team, "_next_run", seen)
    with open_checkpoint(directory) as checkpoint:
        config = build_config(directory, layout="fused", tp_size=1, tp_rank=0, quantization=quantization)
        placement = pipeline.prepare(checkpoint, config).placement
        with segment_of(placement.nbytes) as segment:
            execute(placement, checkpoint.files, segment, threads=threads, slab_nbytes=slab_nbytes)
    assert sum(nbytes for *_, nbytes in runs) == runs[0][0] == sum(one.nbytes for one in checkpoint.tensors.values())
    assert runs[-1][0] == 0
    assert all(nbytes <= left // threads for left, run, nbytes in runs if len(run) > 1)
    assert max(len(run) for _, run, _ in runs) > 4


def test_progress_grows_to_the_end(opened):
    checkpoint, prepared = opened
    heard = []
    with segment_of(prepared.placement.nbytes) as segment:
        execute(prepared.placement, checkpoint.files, segment, progress=lambda *both: heard.append(both))
    totals = {total for _, total in heard}
    assert totals == {sum(placed.nbytes for placed in prepared.placement.placed if not placed.parameter.alias_of)}
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1][0] == heard[-1][1]


def test_a_file_rewritten_while_it_is_read_is_noticed(opened):
    checkpoint, prepared = opened
    path = checkpoint.directory / "model.safetensors"
    rewritten = threading.Event()

    def rewrite(done, total):
        if not rewritten.is_set():
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"!")
            rewritten.set()

    with (
        segment_of(prepared.placement.nbytes) as segment,
        pytest.raises(CheckpointChanged, match=r"model\.safetensors"),
    ):
        pipeline.load(checkpoint, prepared, segment, progress=rewrite)
    assert rewritten.is_set()


def test_a_file_replaced_by_another_is_noticed(opened):
    checkpoint, prepared = opened
    path = checkpoint.directory / "model.safetensors"
    os.replace(tiny_llama(checkpoint.directory / "other") / "model.safetensors", path)
    # The bytes read are right; but unlinking moves ctime, and so the alarm is false, on the safe side.
    with segment_of(prepared.placement.nbytes) as segment, pytest.raises(CheckpointChanged):
        pipeline.load(checkpoint, prepared, segment)


def test_the_manifest_says_what_was_loaded(opened):
    checkpoint, prepared = opened
    with segment_of(prepared.placement.nbytes) as segment:
        loaded = pipeline.load(checkpoint, prepared, segment)
        data = resident(segment, prepared.placement)
    version = "receipts:" + "2" * 64
    encoded = pipeline.encode(
        loaded, prepared, generation="1" * 32, version=version, receipts_version=version, digest=None
    )
    manifest = Manifest.decode(encoded)
    assert tuple(manifest) == loaded.rows
    assert manifest.meta.fingerprint == prepared.plan.config.fingerprint
    assert manifest.meta.bytes_read == manifest.meta.bytes_kept == manifest.content_nbytes
    assert set(manifest.accounting.loaded) == checkpoint.tensors.keys()
    assert set(manifest.meta.seconds) == {"load", "verify"}
    assert all(row.digest == xxhash.xxh3_128(data[row.name]).digest() for row in manifest)


def test_nothing_maps_the_segment_so_it_can_be_sealed_at_once(opened):
    checkpoint, prepared = opened
    segment = host.allocate(prepared.placement.nbytes, name="test")
    try:
        pipeline.load(checkpoint, prepared, segment)
        host.seal(segment)
    finally:
        os.close(segment)


def test_bf16_and_float32_casts_round_to_nearest_even(tmp_path):
    values = np.concatenate([np.arange(0x3F7F_0000, 0x3F82_0000, 0x1000, dtype=np.uint32)]).view(np.float32)
    directory = write_checkpoint(
        tmp_path,
        {"architectures": ["Any"]},
        {"model.safetensors": {"t": RawTensor("F32", values.shape, values.tobytes())}},
    )
    outcome = load(directory, layout="hf", tp_size=1, tp_rank=0, dtype="bfloat16")
    bits = values.view(np.uint32)
    assert (outcome.array("t") == ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)).all()
