"""Rows about the whole: a daemon on the device, and engines that have their weights from it.

In a rehearsal this process's torch has no CUDA: the step from an address to a tensor makes a host tensor there, of the
fake device's memory, which the host can address.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.checkpoints import many_tensors
from tests.gpu.filling import decoder
from tests.gpu.row import (
    GIB,
    Row,
    Setting,
    Skipped,
    folder_of,
    in_words,
    require,
    runtime_dir_of,
    torch_computes,
    torch_with_cuda,
)
from tests.gpu.torch_ipc import seconds_to_share
from tests.gpu.vllm_tokens import SERVED
from tests.support.daemons import Daemon, daemon, supervised_daemon
from weightcached.client import attach, segments
from weightcached.client.weights import WeightSet
from weightcached.protocol.places import Place

if TYPE_CHECKING:
    import torch

VLLM = "0.32"
"""Whose parameter names layout fused has."""
SIZES: tuple[int, ...] = (GIB // 10, GIB, 10 * GIB)
TENSORS = 1000
TARGET_S = 0.020
TARGET_RATIO = 20
TIMES = 5
SETTLED_S = 2.1
"""Receipts of younger files prove nothing, and an attach would wait for their digest."""


def attach_time(setting: Setting) -> str:
    """From ``attach`` to a thousand tensors in a process that has torch and a context already: each size by descriptor
    and by handle, and beside them torch's own sharing of as many. Medians.
    """
    sizes = [setting.nbytes(size) for size in SIZES]
    medians_s = {nbytes: _attach_medians_s(setting, nbytes) for nbytes in sizes}
    slowest_s = {nbytes: max(here_s.values()) for nbytes, here_s in medians_s.items()}
    targets = {f"{TARGET_S * 1e3:.0f} ms at most": max(slowest_s.values()) <= TARGET_S}
    remarks = []
    try:
        torch_with_cuda()
    except Skipped as reason:
        remarks.append(f"not compared with torch's own sharing: {reason}")
    else:
        ratio = math.inf
        for nbytes, theirs_s in zip(sizes, seconds_to_share(TENSORS, sizes=sizes), strict=True):
            medians_s[nbytes]["torch, tensor by tensor"] = theirs_s
            ratio = min(ratio, theirs_s / slowest_s[nbytes])
        targets[f"{ratio:.0f} times faster than torch (target {TARGET_RATIO})"] = ratio >= TARGET_RATIO
    figures = [
        f"{in_words(nbytes)}: " + ", ".join(f"{how} {median_s * 1e3:.1f} ms" for how, median_s in found_s.items())
        for nbytes, found_s in medians_s.items()
    ]
    return setting.judged([*figures, *remarks], targets)


def _attach_medians_s(setting: Setting, nbytes: int) -> dict[str, float]:
    directory = folder_of(setting, "attach") / "model"
    many_tensors(directory, count=TENSORS, nbytes=nbytes)
    time.sleep(SETTLED_S)
    return {memory: _median_attach_s(setting, directory, memory) for memory in ("cuda-vmm", "cuda-ipc")}


def _median_attach_s(setting: Setting, directory: Path, memory: str) -> float:
    with running_daemon(setting, directory, memory=memory) as served:
        seconds = []
        for _ in range(TIMES + 1):
            started_s = time.perf_counter()
            with attached(setting, directory, served.place.runtime_dir, memory=memory) as weights:
                made = weights.values()
                seconds.append(time.perf_counter() - started_s)
                require(len(made) == TENSORS, f"{len(made)} tensors")
                del made
    return statistics.median(seconds[1:])  # the first imports torch


def graph(setting: Setting) -> str:
    """A captured CUDA graph over the weights is replayed after they were unmapped and mapped again where they were."""
    torch_with_cuda()
    import torch

    model = decoder(setting)
    with (
        running_daemon(setting, model) as served,
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

    model = decoder(setting)
    held = torch.ones(1 << 20, device="cuda")
    with running_daemon(setting, model) as served:
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

    where = "cuda" if torch_computes(setting) else "cpu"
    model = decoder(setting)
    prompt = torch.arange(1, 17, device=where).reshape(1, 16)

    def tokens(made: torch.nn.Module) -> list[int]:
        generated = made.to(where).eval().generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        found: list[int] = generated[0].tolist()
        return found

    from_disk = tokens(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto"))
    with (
        running_daemon(setting, model) as served,
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
    model = decoder(setting)
    from_disk = _said_by_vllm(model, "off")
    with running_daemon(setting, model, **SERVED) as served:
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
def running_daemon(
    setting: Setting, model: Path, *, supervised: bool = False, memory: str = "cuda-vmm", **options: Any
) -> Iterator[Daemon]:
    """A daemon that is ready; ``options`` as for :func:`tests.support.daemons.daemon`."""
    runtime_dir = runtime_dir_of(setting)
    maker = supervised_daemon if supervised else daemon
    words = ("--device", f"cuda:{setting.uuid}", "--memory", memory)
    with maker(model, runtime_dir, *words, **options) as served:
        served.place = Place(runtime_dir, "default", f"gpu-{setting.uuid}")
        served.wait_until("ready")
        yield served


@contextmanager
def attached(setting: Setting, model: Path, runtime_dir: Path, *, memory: str = "cuda-vmm") -> Iterator[WeightSet]:
    if not torch_computes(setting):
        from tests.support.gpu_engine import host_tensor

        segments.device_tensor = host_tensor
    device = f"cuda:{setting.uuid}"
    options: dict[str, Any] = {"mode": "require", "device": device, "memory": memory}
    with attach(model, runtime_dir=runtime_dir, timeout_s=60, **options) as weights:
        yield weights


ROWS = (
    Row("attach", "attaching takes milliseconds, whatever the size", attach_time, 200),
    Row("graph", "a captured graph replays right after sleep and wake", graph, 60),
    Row("allocator", "torch's allocator, stream and device stay as they were", allocator, 90),
    Row("tokens", "Transformers generates the same from disk and from the cache", same_tokens, 90),
    Row("vllm", "vLLM generates the same from disk and from the cache", same_tokens_of_vllm, 180),
)
