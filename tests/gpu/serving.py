"""Rows about the whole: a daemon on the device, and engines that have their weights from it.

In a rehearsal this process's torch has no CUDA: the step from an address to a tensor makes a host tensor there, of the
fake device's memory, which the host can address.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.checkpoints import many_tensors
from tests.faults.chaos import processes
from tests.gpu import listing
from tests.gpu.filling import decoder
from tests.gpu.row import GIB, Row, Setting, Skipped, child, folder_of, line_of, require, torch_with_cuda
from tests.gpu.torch_ipc import seconds_to_share
from tests.support.daemons import Daemon, daemon, supervised_daemon
from weightcached.client import HOLDER_LOST_EXIT, attach, segments
from weightcached.client.weights import WeightSet
from weightcached.daemon.worker_process import WORKER_MODULE
from weightcached.protocol.memory.cuda import nvml
from weightcached.protocol.places import Place

if TYPE_CHECKING:
    import torch

VLLM = "0.32"
"""Whose parameter names layout fused has."""
SIZES = (GIB // 10, GIB, 10 * GIB)
TENSORS = 1000
TARGET_S = 0.020
TARGET_RATIO = 20
TIMES = 5
SETTLED_S = 2.1
"""Receipts of younger files prove nothing, and an attach would wait for their digest."""
SETTLES_S = 10.0
BEFORE_THE_KILL = AFTER_IT = 50
"""Matrix products."""
KILLS = 3
BOUND_S = 1.0
"""What protocol/memory/README.md says."""


def outlives_its_keeper(setting: Setting) -> str:
    """kill -9 of the keeper while an engine computes: every product is right, the restarted keeper adopts, and a later
    engine is given the same.
    """
    import torch

    model = decoder(setting, "kept", GIB)
    before = nvml.memory(setting.uuid).used_nbytes
    with _served(setting, model, supervised=True) as served:
        report = served.report()
        require(report.memory == "cuda-vmm", f"memory kind {report.memory}, not cuda-vmm")
        beyond = _settled(lambda: nvml.memory(setting.uuid).used_nbytes - before - report.resident_nbytes)
        require(beyond <= setting.spare_nbytes, f"{beyond} bytes are used beyond the weights")
        said = listing.without_context(setting, report.pid, who="the keeper")
        with attached(setting, model, served.place.runtime_dir) as weights:
            matrix = max(weights.values(), key=torch.Tensor.numel)
            operand = torch.ones(matrix.shape[1], 8, dtype=matrix.dtype, device=matrix.device)
            expected = matrix @ operand
            wrong = sum(not torch.equal(matrix @ operand, expected) for _ in range(BEFORE_THE_KILL))
            seen = len(served.log.lines)
            killed = threading.Thread(target=served.kill_keeper)
            killed.start()
            started_s = time.perf_counter()
            wrong += sum(not torch.equal(matrix @ operand, expected) for _ in range(AFTER_IT))
            killed.join()
            again = served.wait_ready_again(seen)
            seconds = time.perf_counter() - started_s
            wrong += sum(not torch.equal(matrix @ operand, expected) for _ in range(AFTER_IT))
            require(wrong == 0, f"{wrong} products came out other than before")
            require(again.generation == report.generation, "the restarted keeper serves another generation")
            require(again.bytes_read == 0, f"the restarted keeper read {again.bytes_read} bytes anew")
            with attached(setting, model, served.place.runtime_dir) as late:
                require(late.generation == weights.generation, "an engine that came later has another generation")
                require(late.differing() == [], f"rows differ from their digests: {late.differing()[:3]}")
    return (
        f"{BEFORE_THE_KILL + 2 * AFTER_IT} products right, adopted after {seconds:.2f} s with no byte read, every row "
        f"has its digest; used beyond the {report.resident_nbytes} bytes of weights: {beyond}; "
        f"{said}"
    )


def attach_time(setting: Setting) -> str:
    """From ``attach`` to a thousand tensors in a process that has torch and a context already; medians. Each size by
    descriptor, the largest by handle, too.
    """
    figures, slowest_s = [], 0.0
    for size in SIZES:
        directory = folder_of(setting, f"attach-{size}") / "model"
        written = many_tensors(directory, count=TENSORS, nbytes=setting.nbytes(size))
        time.sleep(SETTLED_S)
        kinds = ("cuda-vmm", "cuda-ipc") if size == SIZES[-1] else ("cuda-vmm",)
        medians_s = {memory: _median_attach_s(setting, directory, memory) for memory in kinds}
        slowest_s = max(slowest_s, *medians_s.values())
        said = ", ".join(f"{memory} {median_s * 1e3:.1f} ms" for memory, median_s in medians_s.items())
        figures.append(f"{written.nbytes / GIB:.1f} GiB: {said}")
    figures.append(setting.judge(slowest_s <= TARGET_S, f"{TARGET_S * 1e3:.0f} ms at most"))
    try:
        torch_with_cuda()
    except Skipped as reason:
        figures.append(f"not compared with torch's own sharing: {reason}")
    else:
        theirs_s = seconds_to_share(TENSORS, nbytes=GIB)
        figures.append(f"torch's own, tensor by tensor: {theirs_s * 1e3:.0f} ms")
        figures.append(setting.judge(theirs_s >= TARGET_RATIO * slowest_s, f"at least {TARGET_RATIO} times faster"))
    return "; ".join(figures)


def _median_attach_s(setting: Setting, directory: Path, memory: str) -> float:
    with _served(setting, directory, memory=memory) as served:
        seconds = []
        for _ in range(TIMES + 1):
            started_s = time.perf_counter()
            with attached(setting, directory, served.place.runtime_dir, memory=memory) as weights:
                made = weights.values()
                seconds.append(time.perf_counter() - started_s)
                require(len(made) == TENSORS, f"{len(made)} tensors")
                del made
    return statistics.median(seconds[1:])  # the first imports torch


def stopped_in_time(setting: Setting) -> str:
    """kill -9 of whoever holds weights of kind ``cuda-ipc`` while engines compute with them: they end as they should,
    before the bound, and the supervised daemon loads anew.
    """
    model = decoder(setting, "holder", GIB)
    seconds = []
    with _served(setting, model, supervised=True, memory="cuda-ipc") as served:
        for _ in range(1 if setting.rehearsal else KILLS):
            first = served.report()
            holder = _holder_of(first.pid)
            arguments = [json.dumps(asdict(setting)), str(model), str(served.place.runtime_dir)]
            with child("tests.gpu.computing", *arguments) as engine:
                require(line_of(engine) == "same", "rows differ from their digests")
                seen = len(served.log.lines)
                ended = os.pidfd_open(engine.pid)
                started_s = time.perf_counter()
                os.kill(holder, signal.SIGKILL)
                select.select([ended], [], [], SETTLES_S)
                seconds.append(time.perf_counter() - started_s)
                os.close(ended)
                require(engine.poll() == HOLDER_LOST_EXIT, f"the engine's status is {engine.returncode}")
            again = served.wait_ready_again(seen)
            require(again.generation != first.generation, "the daemon serves what is gone")
    claim = setting.judge(max(seconds) <= BOUND_S, f"{BOUND_S:g} s at most")
    return f"{len(seconds)} kills: median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s; {claim}"


def _holder_of(keeper: int) -> int:
    """The one process that the keeper has started to hold weights. Never by NVML's list: its pids may be those of
    another PID namespace, and mean a stranger here. Skipped where the kernel does not tell a process's children.
    """
    workers = [pid for pid in processes.children(keeper) if WORKER_MODULE in processes.command(pid).split()]
    if len(workers) != 1:
        raise Skipped(f"of the keeper's children {len(workers)} hold weights, as far as /proc tells: nobody is killed")
    return workers[0]


def graph(setting: Setting) -> str:
    """A captured CUDA graph over the weights is replayed after they were unmapped and mapped again where they were."""
    torch_with_cuda()
    import torch

    model = decoder(setting, "graph", GIB)
    with (
        _served(setting, model) as served,
        attached(setting, model, served.place.runtime_dir) as weights,
    ):
        matrix = max(weights.values(), key=torch.Tensor.numel)
        operand = torch.ones(matrix.shape[1], 8, dtype=matrix.dtype, device=matrix.device)
        expected = (matrix @ operand).clone()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            product = matrix @ operand
        address = matrix.data_ptr()
        for _ in range(2):
            product.zero_()
            torch.cuda.synchronize()
            weights.unmap()
            weights.remap()
            require(matrix.data_ptr() == address, "the addresses changed")
            captured.replay()
            torch.cuda.synchronize()
            require(torch.equal(product, expected), "the replayed graph came to another result")
        del captured, product
    return f"replayed twice over {weights.resident_bytes} bytes that were unmapped and mapped again"


def allocator(setting: Setting) -> str:
    """What torch knows of its own memory is the same before, with weights attached, asleep, awake and gone."""
    torch_with_cuda()
    import torch

    def state() -> tuple[object, ...]:
        torch.cuda.synchronize()
        figures = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.current", "num_ooms")
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        current = (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
        return (*(figures[name] for name in names), *current, json.dumps(settings, sort_keys=True, default=str))

    model = decoder(setting, "allocator", GIB)
    held = torch.ones(1 << 20, device="cuda")
    with _served(setting, model) as served:
        before = state()
        with attached(setting, model, served.place.runtime_dir) as weights:
            tensors = weights.values()
            require(state() == before, f"attaching changed torch's allocator: {before} before, {state()} now")
            for step in (weights.unmap, weights.remap):
                step()
                require(state() == before, f"{step.__name__} changed torch's allocator: {before} before, {state()} now")
            del tensors
        require(state() == before, f"letting go changed torch's allocator: {before} before, {state()} now")
    return (
        f"{before[0]} bytes allocated and {before[1]} reserved all the time, by torch; {held.numel()} ones of its own"
    )


def same_tokens(setting: Setting) -> str:
    """Transformers generates from disk and from the cache, greedily."""
    try:
        import transformers
    except ImportError:
        raise Skipped("transformers is not installed") from None
    if not setting.rehearsal:
        torch_with_cuda()
    import torch

    from weightcached.client.transformers.loading import binding_to

    where = "cpu" if setting.rehearsal else "cuda"
    model = decoder(setting, "tokens", GIB)
    prompt = torch.arange(1, 17, device=where).reshape(1, 16)

    def tokens(made: torch.nn.Module) -> list[int]:
        generated = made.to(where).eval().generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        found: list[int] = generated[0].tolist()
        return found

    from_disk = tokens(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto"))
    with (
        _served(setting, model) as served,
        attached(setting, model, served.place.runtime_dir) as weights,
    ):
        with binding_to(weights):
            made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        shared = {tensor.data_ptr() for tensor in weights.values()}
        own = [name for name, parameter in made.named_parameters() if parameter.data_ptr() not in shared]
        require(own == [], f"parameters that are not the shared ones: {own[:3]}")
        from_cache = tokens(made)
        still = [name for name, parameter in made.named_parameters() if parameter.data_ptr() not in shared]
        require(still == [], f"parameters were copied on the way to the device: {still[:3]}")
        del made
    require(from_cache == from_disk, f"other tokens: {from_disk[16:24]} from disk, {from_cache[16:24]} from the cache")
    return f"{len(from_disk) - 16} tokens, the same"


def same_tokens_of_vllm(setting: Setting) -> str:
    """vLLM generates from disk and from the cache, greedily, each in a process of its own."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise Skipped("vllm is not installed") from None
    if not found.startswith(f"{VLLM}."):
        raise Skipped(f"vllm {found} is installed, and layout fused is that of {VLLM}")
    if setting.rehearsal:
        raise Skipped("vLLM computes on a GPU, and here is none")
    torch_with_cuda()
    model = decoder(setting, "vllm", GIB)
    from_disk = _said_by_vllm(model, "off")
    with _served(setting, model, "--layout", "fused") as served:
        from_cache = _said_by_vllm(model, "require", str(served.place.runtime_dir))
    tokens, report = from_cache["tokens"], from_cache["report"]
    wanted = from_disk["tokens"]
    require(tokens == wanted, f"other tokens: {wanted[:8]} from disk, {tokens[:8]} from the cache")
    require(report["made_anew"] == 0, f"{report['made_anew']} bytes of the weights were made anew")
    return f"{len(tokens)} tokens, the same; {report['nbytes_shared']} bytes shared, none made anew"


def _said_by_vllm(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "tests.gpu.vllm_tokens", *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    require(ended.returncode == 0, f"vLLM ended with {ended.returncode}")
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said


@contextmanager
def _served(
    setting: Setting, model: Path, *words: str, supervised: bool = False, memory: str = "cuda-vmm"
) -> Iterator[Daemon]:
    """A daemon that is ready."""
    runtime_dir = folder_of(setting, "run") / "run"
    maker = supervised_daemon if supervised else daemon
    with maker(model, runtime_dir, "--device", f"cuda:{setting.uuid}", "--memory", memory, *words) as served:
        served.place = Place(runtime_dir, "default", f"gpu-{setting.uuid}")
        served.wait_until("ready")
        yield served


@contextmanager
def attached(setting: Setting, model: Path, runtime_dir: Path, *, memory: str = "cuda-vmm") -> Iterator[WeightSet]:
    if setting.rehearsal:
        from tests.support.gpu_engine import host_tensor

        segments.device_tensor = host_tensor
    device = f"cuda:{setting.uuid}"
    options: dict[str, Any] = {"mode": "require", "device": device, "memory": memory}
    with attach(model, runtime_dir=runtime_dir, timeout_s=60, **options) as weights:
        yield weights


def _settled(measure: Callable[[], int]) -> int:
    """``measure()`` when it is 0, or what it is after a while: a worker that ended takes some time to be gone."""
    until_s = time.monotonic() + SETTLES_S
    while (found := measure()) != 0 and time.monotonic() < until_s:
        time.sleep(0.05)
    return found


ROWS = (
    Row("kept", "weights outlive their keeper, and a computation does not notice", outlives_its_keeper, 90),
    Row("attach", "attaching takes milliseconds, whatever the size", attach_time, 200),
    Row("holder", "who reads memory whose holder is killed is stopped in time", stopped_in_time, 120),
    Row("graph", "a captured graph replays right after sleep and wake", graph, 60),
    Row("allocator", "torch's allocator, stream and device stay as they were", allocator, 90),
    Row("tokens", "Transformers generates the same from disk and from the cache", same_tokens, 90),
    Row("vllm", "vLLM generates the same from disk and from the cache", same_tokens_of_vllm, 180),
)
