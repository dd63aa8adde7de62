"""The worker as a process: what it reports, what it leaves, and how it ends when anything around it goes wrong."""

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint, raw_tensor, tiny_llama, write_checkpoint
from tests.support.execution import load
from tests.support.resources import nothing_left_behind
from tests.support.workers import GENERATION, TIMEOUT_S, VERSION, Running, worker
from weightcached.protocol.channel import Channel
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import (
    CheckpointChanged,
    InsufficientMemory,
    MissingShard,
    ProtocolError,
    TruncatedFile,
    UnsupportedModel,
)
from weightcached.protocol.framing import PeerClosed
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.memory import host
from weightcached.protocol.processes import STEP_BACK_NICENESS
from weightcached.protocol.worker_messages import KEEPER_TO_WORKER, WORKER_TO_KEEPER, Done, Memory, Planned


@pytest.fixture
def model(tmp_path):
    return make_checkpoint(tmp_path / "llama", "llama")


def config_of(directory, **options):
    return build_config(directory, **{"layout": "fused", "tp_size": 1, "tp_rank": 0, **options})


@pytest.fixture
def large(tmp_path):
    """A checkpoint that takes the worker long enough to be stopped at it: 1 GiB of zeros that take no room on disk."""
    shape = (256, 1 << 21)
    directory = write_checkpoint(
        tmp_path / "large", {"architectures": ["Any"]}, {"model.safetensors": {"t": raw_tensor("t", (1, 1))}}
    )
    path = directory / "model.safetensors"
    text = path.read_bytes()[8:].split(b"}}")[0] + b"}}"
    text = text.replace(b"[1,1]", b"[%d,%d]" % shape).replace(b"[0,2]", b"[0,%d]" % (shape[0] * shape[1] * 2))
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + shape[0] * shape[1] * 2)
    return directory


def contents(fd, nbytes):
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        return file.read(nbytes)


def test_a_job_done(model):
    config = config_of(model, tp_size=2, tp_rank=1)
    wanted = load(model, layout="fused", tp_size=2, tp_rank=1, expendable=True)
    with nothing_left_behind(), worker() as running:
        planned = running.plan(model, config)
        assert planned.segments_nbytes == (wanted.prepared.placement.nbytes,)
        assert planned.bytes_to_read == wanted.loaded.figures.bytes_requested
        assert planned.accounting.expected == planned.accounting.loaded > 0
        segment = running.give_memory(*planned.segments_nbytes)
        done = running.expect(Done)
        host.seal(segment)  # at once: nothing of it is mapped any more
        manifest_fd = running.fds[1]
        host.verify(manifest_fd, nbytes=done.manifest_nbytes, what="the manifest")
        manifest = Manifest.decode(contents(manifest_fd, done.manifest_nbytes))
        assert running.exit_status() == 0
        assert running.is_silent()
        data = contents(segment, planned.segments_nbytes[0])
    assert tuple(manifest) == wanted.loaded.rows
    assert {row.name: data[row.offset : row.offset + row.nbytes] for row in manifest} == wanted.data
    meta = manifest.meta
    assert (meta.generation, meta.version, meta.receipts_version, meta.digest) == (GENERATION, VERSION, VERSION, None)
    assert meta.fingerprint == config.fingerprint
    assert meta.segments_nbytes == planned.segments_nbytes
    assert done.bytes_read == meta.bytes_read == wanted.loaded.figures.bytes_read
    assert done.resident_nbytes == planned.segments_nbytes[0]
    assert [(p.stage, p.bytes_done) for p in running.progress][-1] == ("load weights", manifest.content_nbytes)


@pytest.mark.parametrize("quantization", ["fp8", "fp8-block", "int4-asym=8"])
def test_quantized_jobs_too(model, quantization):
    config = config_of(model, quantization=quantization)
    wanted = load(model, layout="fused", tp_size=1, tp_rank=0, quantization=quantization)
    with worker() as running:
        planned = running.plan(model, config)
        segment = running.give_memory(*planned.segments_nbytes)
        done = running.expect(Done)
        assert tuple(Manifest.decode(contents(running.fds[1], done.manifest_nbytes))) == wanted.loaded.rows
        data = contents(segment, planned.segments_nbytes[0])
        assert {n: data[row.offset : row.offset + row.nbytes] for n, row in wanted.rows.items()} == wanted.data


def test_an_empty_segment_is_fine(tmp_path):
    directory = write_checkpoint(
        tmp_path, {"architectures": ["Any"]}, {"model.safetensors": {"t": raw_tensor("t", (0, 4))}}
    )
    with worker() as running:
        planned = running.plan(directory, config_of(directory, layout="hf"))
        assert planned.segments_nbytes == (0,)
        running.give_memory(0)
        assert running.expect(Done).resident_nbytes == 0
        assert running.exit_status() == 0


def test_a_load_without_transforms_has_neither_torch_nor_numpy_in_it(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        running.give_memory(*planned.segments_nbytes)
        running.stop_at_first_progress()
        maps = Path(f"/proc/{running.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" not in maps
    assert "xxhash" in maps  # the names of extension modules do show


def test_torch_is_not_imported_before_the_plan_is_reported(model):
    with worker() as running:
        running.plan(model, config_of(model, quantization="fp8"))
        assert "libtorch" not in Path(f"/proc/{running.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda directory: os.truncate(directory / "model.safetensors", 5000), TruncatedFile),
        (lambda directory: os.unlink(directory / "model.safetensors"), MissingShard),
    ],
)
def test_a_bad_checkpoint_is_reported_before_any_memory_is_asked_for(model, spoil, error):
    config = config_of(model)
    spoil(model)
    with worker() as running:
        running.send_job(model, config)
        failed = running.failure()
    assert (failed.code, failed.transient) == (error.code, False)
    assert failed.where in (str(model), str(model / "model.safetensors"))


def test_a_model_without_rules_is_reported(tmp_path):
    directory = tiny_llama(tmp_path / "unheard-of")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("LlamaForCausalLM", "UnheardOfForCausalLM"))
    with worker() as running:
        running.send_job(directory, config_of(directory))
        failed = running.failure()
    assert (failed.code, failed.transient) == (UnsupportedModel.code, False)
    assert "--layout hf" in str(failed.next_step)


def test_beside_weights_that_are_served_it_steps_back_behind_everybody_else(model):
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with worker() as first, worker("--yield") as beside:
        for running in (first, beside):
            running.plan(model, config_of(model))
        assert os.getpriority(os.PRIO_PROCESS, first.pid) == ours
        assert os.getpriority(os.PRIO_PROCESS, beside.pid) == STEP_BACK_NICENESS


def test_files_that_change_between_plan_and_memory_are_noticed(model):
    with worker() as running:
        planned = running.plan(model, config_of(model))
        with open(model / "model.safetensors", "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"!!")
        running.give_memory(*planned.segments_nbytes)
        failed = running.failure()
    assert (failed.code, failed.transient) == (CheckpointChanged.code, True)
    assert "model.safetensors" in str(failed.found)


def test_files_that_change_while_they_are_read_are_noticed(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        running.give_memory(*planned.segments_nbytes)
        running.stop_at_first_progress()
        with open(large / "model.safetensors", "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"!!")
        running.process.send_signal(signal.SIGCONT)
        assert running.failure().code == CheckpointChanged.code


def test_a_file_cut_off_while_it_is_read_kills_nobody(large):
    """A mapping of the file would be SIGBUS here."""
    path = large / "model.safetensors"
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        running.give_memory(*planned.segments_nbytes)
        running.stop_at_first_progress()
        os.truncate(path, path.stat().st_size // 2)
        running.process.send_signal(signal.SIGCONT)
        failed = running.failure()
    assert failed.code == TruncatedFile.code
    assert "'t'" in failed.message


def test_a_worker_killed_while_it_fills_says_nothing_of_done(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        segment = running.give_memory(*planned.segments_nbytes)
        running.stop_at_first_progress()
        assert os.fstat(segment).st_blocks * 512 < planned.segments_nbytes[0]  # half filled, at most
        running.process.kill()
        assert running.exit_status() == -signal.SIGKILL
        assert running.is_silent()


def test_without_memory_for_its_own_work_it_says_so_and_that_it_may_pass(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        status = Path(f"/proc/{running.pid}/status").read_text()
        in_use = int(next(line for line in status.splitlines() if line.startswith("VmSize")).split()[1]) * 1024
        resource.prlimit(running.pid, resource.RLIMIT_AS, (in_use + (1 << 20), in_use + (1 << 20)))
        running.give_memory(*planned.segments_nbytes)
        failed = running.failure()
    assert (failed.code, failed.transient) == (InsufficientMemory.code, True)


def test_a_keeper_that_speaks_out_of_turn_is_told(model):
    with worker() as running:
        running.plan(model, config_of(model))
        running.send_job(model, config_of(model))
        assert running.failure().code == ProtocolError.code


@pytest.mark.parametrize("segments", [0, 2])
def test_any_number_of_segments_but_one_is_refused(model, segments):
    with worker() as running:
        planned = running.plan(model, config_of(model))
        if segments:
            running.give_memory(*planned.segments_nbytes * segments)
        else:
            running.channel.send(Memory(version=VERSION, receipts_version=VERSION, digest=None))
        assert running.failure().code == ProtocolError.code


def test_it_ends_when_the_keeper_closes_the_channel(model):
    with worker() as running:
        running.plan(model, config_of(model))
        running.channel.close()
        assert running.exit_status() == 2


def test_it_ends_at_its_next_word_when_the_keeper_has_closed_the_channel(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        running.give_memory(*planned.segments_nbytes)
        running.stop_at_first_progress()
        running.channel.close()
        running.process.send_signal(signal.SIGCONT)
        assert running.exit_status() == 2


def test_ctrl_c_is_the_keepers_business(large):
    with worker() as running:
        planned = running.plan(large, config_of(large, layout="hf"))
        running.process.send_signal(signal.SIGINT)
        running.give_memory(*planned.segments_nbytes)
        running.expect(Done)
        assert running.exit_status() == 0


KEEPER = """
import subprocess, sys
fd = int(sys.argv[1])
child = subprocess.Popen([sys.executable, "-m", "weightcached.loader.worker", "--fd", str(fd)], pass_fds=[fd])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def orphanage():
    """(worker's channel as Running, the process that started it): a keeper that can be killed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    running = Running(keeper, Channel(ours, outgoing=KEEPER_TO_WORKER, incoming=WORKER_TO_KEEPER))
    assert keeper.stdout is not None
    worker_pidfd = os.pidfd_open(int(keeper.stdout.readline()))
    try:
        yield running, worker_pidfd
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker_pidfd, signal.SIGKILL)
        keeper.kill()
        keeper.communicate()
        running.channel.close()
        running.fds.close()
        os.close(worker_pidfd)


def has_ended(pidfd):
    return bool(select.select([pidfd], [], [], TIMEOUT_S)[0])


def test_it_dies_with_its_keeper_although_the_channel_stays_open(orphanage, model):
    running, worker_pidfd = orphanage
    running.send_job(model, config_of(model), keeper_pid=running.pid)
    running.expect(Planned)  # by now it has asked the kernel to be killed
    running.process.kill()
    assert has_ended(worker_pidfd)


def test_it_does_not_outlive_a_keeper_that_died_before_it_looked(orphanage, model):
    running, worker_pidfd = orphanage
    running.process.kill()
    running.process.wait()
    running.send_job(model, config_of(model), keeper_pid=running.pid)
    with pytest.raises((PeerClosed, TimeoutError)):
        running.expect(Planned)
    assert has_ended(worker_pidfd)
