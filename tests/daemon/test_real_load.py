"""Keeper and loader together: real checkpoints, the real worker, every byte that is granted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import bf16_bits, tiny_config, tiny_llama, tiny_shapes
from tests.support.daemons import Daemon, converse, daemon
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.messages import Grant, Refused


@contextmanager
def attached(served: Daemon) -> Iterator[tuple[Grant, Manifest, memoryview]]:
    """The grant, the decoded manifest and the bytes of the only segment."""
    grant, fds = served.attach()
    with fds:
        written = host.map_readonly(fds[0], nbytes=grant.manifest_nbytes)
        manifest = Manifest.decode(bytes(written.view()))
        segment = host.map_readonly(fds[1], nbytes=grant.segments[0].nbytes)
    yield grant, manifest, segment.view()


def test_every_parameter_is_what_the_checkpoint_says(model: Path, runtime_dir: Path) -> None:
    shapes = tiny_shapes(tiny_config())
    with daemon(model, runtime_dir) as served:
        report = served.wait_until("ready")
        with attached(served) as (grant, manifest, segment):
            assert set(manifest.names) == set(shapes)
            for name in manifest.names:
                row = manifest.row(name)
                assert row.shape == shapes[name]
                data = segment[row.offset : row.offset + row.nbytes]
                assert bytes(data) == bf16_bits(name, row.shape).tobytes(), name
            assert manifest.meta.generation == grant.generation == report.generation
            assert report.accounting == grant.accounting
            assert report.accounting.loaded == report.accounting.expected == len(shapes)
            assert report.bytes_kept == manifest.meta.bytes_kept == manifest.content_nbytes == report.bytes_read
            assert manifest.meta.fingerprint == report.fingerprint
            assert manifest.meta.receipts_version == grant.receipts_version
        assert served.report().attaches == {"granted": 1}  # receipts alone proved it
        assert served.report().own_memory_nbytes < 64 << 20
        maps = Path(f"/proc/{served.pid}/maps").read_text()
        assert "torch" not in maps
        assert "numpy" not in maps


def test_a_quantized_rank_of_two(model: Path, runtime_dir: Path) -> None:
    """With torch in the worker, and still none in the keeper. A block is a list where config travels as JSON."""
    options = {"layout": "fused", "tp_size": 2, "tp_rank": 1, "quantization": "fp8-block=16x16"}
    with daemon(model, runtime_dir, **options) as served:
        report = served.wait_until("ready")
        assert (report.tp_rank, report.tp_size, report.quantization) == (1, 2, "fp8-block=16x16")
        with attached(served) as (grant, manifest, _):
            row = manifest.row("model.layers.0.self_attn.qkv_proj.weight")
            assert row.dtype == "float8_e4m3fn"
            assert row.shape == ((4 + 2 + 2) * 8 // 2, 32)
            assert manifest.row("model.layers.0.self_attn.qkv_proj.weight_scale_inv").shape == (2, 2)
            assert grant.provenance.path == str(model)
        assert "torch" not in Path(f"/proc/{served.pid}/maps").read_text()
        channel = served.connect()
        try:
            other_rank = converse(channel, served.hello(tp_rank=0)).message
        finally:
            channel.close()
        assert isinstance(other_rank, Refused)
        assert [(field.name, field.value) for field in other_rank.fields] == [("parallel.tp_rank", 1)]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "truncated_file"),
        (lambda file: file.unlink(), "missing_shard"),
        (lambda file: file.rename(file.with_suffix(".bin")), "pickle_refused"),
    ],
)
def test_a_damaged_checkpoint_is_a_failed_load_with_its_reason(
    tmp_path: Path, runtime_dir: Path, damage: object, code: str
) -> None:
    broken = tiny_llama(tmp_path / "broken")
    damage(broken / "model.safetensors")  # type: ignore[operator]
    with daemon(broken, runtime_dir) as served:
        report = served.wait_until("failed")
        assert str(report.last_error).startswith(f"{code}:")
        assert sum(record.get("stage") == "start worker" for record in served.log.records()) == 1


def test_a_layout_that_does_not_know_the_model(tmp_path: Path, runtime_dir: Path) -> None:
    directory = tiny_llama(tmp_path / "m", architecture="MistralForCausalLM")
    config = (directory / "config.json").read_text().replace("MistralForCausalLM", "UnheardOfForCausalLM")
    (directory / "config.json").write_text(config)
    with daemon(directory, runtime_dir, layout="fused") as served:
        assert str(served.wait_until("failed").last_error).startswith("unsupported_model:")
