"""An engine with weights on a GPU, as a process that tests tell what to do, on the driver that needs no GPU.

    with gpu_engine(fake, model, runtime_dir, device="cuda:0") as engine:
        engine.ask("digests")

That driver's device pointers are host pointers, and torch here has no CUDA: in the engine's process the one step from
an address to torch (``client.segments.device_tensor``) makes a host tensor there instead. All else is what runs on a
GPU. The words are the methods of :class:`_Engine`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.fakecuda import FakeCuda
from tests.support.unprivileged import ROOT


class GpuEngine:
    """One engine's process. ``ask`` waits for its answer; what it raises there is an AssertionError here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, word: str) -> Any:
        self._stdin.write(word + "\n")
        self._stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        line = self._stdout.readline()
        assert line, f"the engine has ended with {self.process.wait()}"
        said = json.loads(line)
        assert "error" not in said, said["error"]
        return said["answer"]

    def error(self) -> dict[str, Any]:
        """What it says instead of attaching; it ends then."""
        said: dict[str, Any] = json.loads(self._stdout.readline())["error"]
        assert self.process.wait() == 1
        return said


@contextmanager
def gpu_engine(
    fake: FakeCuda, model_dir: Path, runtime_dir: Path, *, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[GpuEngine]:
    """An engine that attaches with these ``options``. It closes and ends by itself, with 0, unless it was killed."""
    given = json.dumps({"model": str(model_dir), "runtime_dir": str(runtime_dir), "timeout_s": 60.0, **options})
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", "from tests.support.gpu_engine import main; main()", given],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **fake.environment, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    engine = GpuEngine(process)
    try:
        yield engine
    except BaseException:
        process.kill()
        raise
    finally:
        killed = process.poll() is not None
        engine._stdin.close()
        status = process.wait(60)
        engine._stdout.close()
    assert killed or status == 0


def command(*words: object) -> list[str]:
    """`weightcached …` as a process whose torch has tensors of the fake device's memory."""
    program = "from tests.support.gpu_engine import run_command; run_command()"
    return [sys.executable, "-P", "-c", program, *map(str, words)]


def run_command() -> None:
    """What :func:`command` runs."""
    from weightcached.client import segments
    from weightcached.daemon import cli

    segments.device_tensor = host_tensor
    sys.exit(cli.main(sys.argv[1:]))


class _Engine:
    """The process's own side."""

    def __init__(self, **options: Any) -> None:
        from weightcached.client import attach

        self.weights = attach(**options)
        self._resumed = threading.Semaphore(0)
        if self.weights.lease is not None:
            self.weights.lease.on_resumed(lambda _: self._resumed.release())

    def attached(self) -> dict[str, Any]:
        """What it has: the first answer."""
        weights = self.weights
        return {
            "source": weights.source,
            "generation": weights.generation,
            "version": weights.version,
            "resident_bytes": weights.resident_bytes,
            "names": len(weights),
        }

    def digests(self) -> dict[str, str]:
        """Name → SHA-256 of the tensor's bytes, by way of the tensors."""
        import hashlib

        import torch

        return {
            name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.weights.items()
        }

    def differing(self) -> list[str]:
        return self.weights.differing()

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.weights.items()}

    def copies_written_to(self) -> int:
        """Every copy, overwritten; how many. Were one the shared memory itself, this process would end here."""
        return sum(
            tensor.zero_() is tensor for reuse in (False, True) for _, tensor in self.weights.copies(reuse_memory=reuse)
        )

    def bind_with_buffers(self) -> list[int]:
        """A module of all weights is bound, in which those of one dimension are buffers, the first with memory already.
        How many parameters are the shared memory, and how many buffers are not, and were written to.
        """
        import torch

        from weightcached.client import bind

        module, real = torch.nn.Module(), True
        for name, tensor in self.weights.items():
            owner, leaf = _owner(module, name)
            if tensor.dim() == 1:
                owner.register_buffer(leaf, torch.empty_like(tensor, device=None if real else "meta"))
                real = False
            else:
                owner.register_parameter(leaf, torch.nn.Parameter(tensor.to("meta"), requires_grad=False))
        bind(module, self.weights)
        shared = set(self.addresses().values())
        written = [buffer.zero_() for buffer in module.buffers()]
        return [
            sum(parameter.data_ptr() in shared for parameter in module.parameters()),
            sum(buffer.data_ptr() not in shared for buffer in written),
        ]

    def unmap(self) -> None:
        self.weights.unmap()

    def remap(self) -> None:
        self.weights.remap()

    def write(self) -> str:
        """Write to the first tensor where it is; its name."""
        name = next(iter(self.weights))
        self.weights[name].zero_()
        return name

    def refused(self) -> list[str]:
        """What is said to the words that memory of this kind cannot carry out."""
        from weightcached.protocol.errors import SwapRefused, UnsupportedModel

        said = []
        for word in (self.weights.unmap, self.weights.remap, self.weights.revert, self.weights.stage):
            try:
                word()
            except (UnsupportedModel, SwapRefused) as error:
                said.append(f"{error.code}: {error}")
        return said

    def close_but_a_tensor(self) -> None:
        """The set is closed; one tensor of it is kept."""
        self.tensor = self.weights[next(iter(self.weights))]
        self.weights.close()

    def drop_the_tensor(self) -> list[str]:
        """Nothing of the set is left; the threads that are."""
        del self.tensor
        for thread in threading.enumerate():
            if thread.name == "weightcached-holder":
                thread.join(20)
        return [thread.name for thread in threading.enumerate()]

    def swap(self) -> dict[str, Any]:
        """To what the daemon has in use; what it has then, as at first."""
        with self.weights.stage() as staged, self.weights.barrier.stopped() as stopped:
            staged.swap(stopped)
        return self.attached()

    def take_a_context(self) -> None:
        """As torch does when it computes: from now on NVML lists this process."""
        from weightcached.protocol.memory.cuda.context import Context
        from weightcached.protocol.memory.cuda.devices import find

        self.context = Context(find(None))

    def lease(self) -> str:
        assert self.weights.lease is not None
        return self.weights.lease.state

    def wait_for_its_lease(self) -> str:
        """Until it has been resumed once more than was waited for before."""
        assert self._resumed.acquire(timeout=60)
        return self.lease()

    def host_bytes(self) -> str:
        """Asking for what the host cannot have."""
        from weightcached.protocol.errors import UnsupportedModel

        try:
            self.weights.memory()
        except UnsupportedModel as error:
            return str(error)
        return "no error"

    def tensors_outlive_the_set(self) -> float:
        """The sum of a tensor that is all that is left of the set."""
        tensor = self.weights[next(iter(self.weights))]
        before = float(tensor.double().sum())
        self.weights.close()
        after = float(tensor.double().sum())
        assert before == after
        return after

    def loaded_modules(self) -> list[str]:
        return sorted(sys.modules)


def _owner(module: Any, name: str) -> tuple[Any, str]:
    """The submodule of ``name``, made where it is missing, and what it is called there."""
    import torch

    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    return module, leaf


def host_tensor(segment: Any) -> Any:
    """``device_tensor`` for a driver whose device pointers are host pointers: the tensor holds the mapping, too."""
    import torch

    shown = segment.__cuda_array_interface__
    block = (ctypes.c_ubyte * shown["shape"][0]).from_address(shown["data"][0])
    block.owner = segment
    return torch.frombuffer(block, dtype=torch.uint8)


def main() -> None:
    from weightcached.client import segments
    from weightcached.protocol.errors import WeightCacheError

    segments.device_tensor = host_tensor
    try:
        engine = _Engine(**json.loads(sys.argv[1]))
    except WeightCacheError as error:
        print(json.dumps({"error": error.as_fields()}), flush=True)
        sys.exit(1)
    print(json.dumps({"answer": engine.attached()}), flush=True)
    for word in sys.stdin:
        try:
            said = {"answer": getattr(engine, word.strip())()}
        except Exception as error:  # noqa: BLE001 - the test is told, and decides
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    engine.weights.close()
