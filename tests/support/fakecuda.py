"""CUDA's driver without a GPU, for tests: builds tests/fakecuda, and owns the directory that a test's processes share.

``tests/fakecuda/README.md`` says what it proves and what not. Fixtures: ``fake_cuda`` (for other processes) and
``cuda_here`` (for this one), in tests/conftest.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "fakecuda"
LIBRARIES = {
    "libcuda.so.1": ("driver.c", "vmm.c", "legacy.c", "streams.c", "state.c"),
    "libnvidia-ml.so.1": ("nvml.c", "state.c"),
}
GRANULARITY = 2 << 20
CONTEXT_NBYTES = 4 << 20
DEVICE_NBYTES = 64 << 20

OUT_OF_MEMORY, INVALID_VALUE, NOT_SUPPORTED, UNKNOWN = 2, 1, 801, 999

GIVING_BACK = {
    "cuCtxPopCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuEventDestroy",
    "cuIpcCloseMemHandle",
    "cuMemAddressFree",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuStreamDestroy",
}


def gives_back(calls: Sequence[str], number: int) -> bool:
    """Whether that one of the calls is for giving something back, in its context: where it fails something is left."""
    begun = calls[number] == "cuCtxPushCurrent" and number + 1 < len(calls)
    return calls[number + begun] in GIVING_BACK


def build(folder: Path) -> Path:
    """Both libraries in ``folder``, from warning-free C."""
    for library, sources in LIBRARIES.items():
        flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library}"]
        paths = [str(SOURCES / source) for source in sources]
        subprocess.run(["gcc", *flags, "-o", str(folder / library), *paths, "-lpthread"], check=True)
    return folder


@dataclass(frozen=True)
class FakeDevice:
    """One line of the table. ``uuid`` as the project writes it; a faster one comes first for the driver."""

    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    nbytes: int = DEVICE_NBYTES
    speed: int = 1
    name: str = "Fake GPU"
    mig: bool = False

    def line(self) -> str:
        return f"{'MIG' if self.mig else 'GPU'} {self.uuid} {self.nbytes} {self.speed} {self.name}\n"


@dataclass(frozen=True)
class LiveMemory:
    uuid: str
    nbytes: int
    pid: int
    kind: str
    """``vmm`` or ``legacy``. ``pid`` made it, and may be dead."""


class FakeCuda:
    """The devices, and what the processes have done with them."""

    def __init__(self, libraries: Path, directory: Path, *devices: FakeDevice) -> None:
        self.libraries = libraries
        self.directory = directory
        for name in ("memory", "contexts", "leaks", "peaks"):
            (directory / name).mkdir()
        self.devices: tuple[FakeDevice, ...] = ()
        self.plug(*devices or (FakeDevice(),))

    def plug(self, *devices: FakeDevice) -> None:
        """These are there from now on, in the order of their slots, for whoever initialises his driver."""
        self.devices = devices
        (self.directory / "devices").write_text("".join(device.line() for device in devices))

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give a process these devices."""
        paths = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"FAKECUDA": str(self.directory), "LD_LIBRARY_PATH": ":".join(filter(None, paths))}

    @property
    def whole_environment(self) -> dict[str, str]:
        """This process's environment with these devices in it."""
        return {**os.environ, **self.environment}

    def fail(self, *rules: tuple[str, int | str, int]) -> None:
        """From now on, in every process: the call's name (or ``*``), the how manieth of the process (or ``*``), the
        result. None: nothing fails any more. Give ``FAKECUDA_FAIL`` to a process for rules of its own.
        """
        (self.directory / "fail.new").write_text("".join(f"{name} {nth} {result}\n" for name, nth, result in rules))
        (self.directory / "fail.new").rename(self.directory / "fail")

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """The call does not return, in any process, before the block is left; it is in :meth:`calls` by then."""
        with (self.directory / "held.new").open("w") as file:
            file.write(call)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            (self.directory / "held.new").rename(self.directory / "held")
            try:
                yield
            finally:
                (self.directory / "held").unlink()

    def lose(self, call: str, nth: int | str = "*") -> None:
        """When a process makes this call (for the ``nth`` time) the devices are gone: that call fails, and from then on
        every call of every process. Who has met that stays without a device, also when they are :meth:`found`.
        """
        (self.directory / "lose").write_text(f"{call} {nth} 1\n")

    def found(self) -> None:
        """What was lost is there again."""
        for name in ("lose", "lost"):
            (self.directory / name).unlink(missing_ok=True)

    def worsen(self, *quirks: str) -> None:
        """Be worse than the real driver: ``forgetful`` (memory dies with the process that made it), ``unprotected``
        (read-only mappings are not) or ``hoarding`` (no memory comes back). Or another one: ``other-pids`` lists
        processes by what they are called elsewhere.
        """
        (self.directory / "quirks").write_text(" ".join(quirks))

    def calls(self, pid: int | None = None) -> list[str]:
        """The calls made so far, by all processes or one, NVML's too."""
        path = self.directory / "calls"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [name for who, name in lines if pid in (None, int(who))]

    def memory(self) -> list[LiveMemory]:
        """What takes room on a device now: a handle, a mapping or a descriptor of it is somewhere, in any process."""
        return [
            LiveMemory(str(uuid.UUID(identity)), int(nbytes), int(pid), kind)
            for identity, _, nbytes, pid, kind in (path.name.split("-") for path in self._live("memory"))
        ]

    def used_nbytes(self, device: str | None = None) -> int:
        """Of one device, or of all: memory alone, without contexts."""
        return sum(memory.nbytes for memory in self.memory() if device in (None, memory.uuid))

    def peak_nbytes(self, device: str | None = None) -> int:
        """The most that was taken at any time since this was last asked, contexts included; of one device, or the
        fullest.
        """
        with self._locked():
            found = {str(uuid.UUID(path.name)): path for path in (self.directory / "peaks").iterdir()}
            peaks = [int(path.read_text()) for name, path in found.items() if device in (None, name)]
            for path in found.values():
                path.unlink()
        return max(peaks, default=0)

    def contexts(self) -> list[int]:
        """The processes that have a context now."""
        return [int(path.name.split("-")[1]) for path in self._live("contexts")]

    def leaks(self) -> dict[int, str]:
        """What processes that ended regularly had not given back, contexts apart, by pid. Fixture ``fake_cuda`` wants
        none in the end.
        """
        return {int(path.name): path.read_text().strip() for path in (self.directory / "leaks").iterdir()}

    def take_leaks(self) -> list[str]:
        """The same, without repetition, from a test that has seen to it that there are some: they are not wanted to
        be none any more.
        """
        found = self.leaks()
        for pid in found:
            (self.directory / "leaks" / str(pid)).unlink()
        return sorted(set(found.values()))

    def sweep(self) -> None:
        """Have dead holders' memory go now: whoever still reads it meets SIGBUS. Any allocation does the same."""
        with self._locked():
            for path in (self.directory / "memory").iterdir():
                if path.name.endswith("-legacy") and not _held(path):
                    os.truncate(path, 0)
                    path.unlink()

    def _live(self, folder: str) -> list[Path]:
        with self._locked():
            return [path for path in (self.directory / folder).iterdir() if _held(path)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No process makes memory meanwhile: it would find the lock of what it makes taken, by whoever asks."""
        with (self.directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _held(path: Path) -> bool:
    """Whether any descriptor or mapping shares the lock of the file. The library asks the same way."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def fake_cuda_in_memory(libraries: Path, devices: Sequence[FakeDevice] = ()) -> Iterator[FakeCuda]:
    """A fake with a directory of its own, in memory where the machine has a place for that."""
    with tempfile.TemporaryDirectory(
        prefix="fakecuda-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as at:
        yield FakeCuda(libraries, Path(at), *devices)


class CudaHere:
    """The libraries in this very process, which has them once and for all; each test begins anew with its directory."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        # Under their own names, so that whoever asks for libcuda.so.1 later is given these.
        self._driver = ctypes.CDLL(str(fake.libraries / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self._nvml = ctypes.CDLL(str(fake.libraries / "libnvidia-ml.so.1"))
        self.reset()

    def live(self) -> str:
        """What this process has not given back, in words; empty when nothing."""
        text = ctypes.create_string_buffer(512)
        self._driver.fakecuda_live(text, len(text))
        return text.value.decode()

    def reset(self) -> None:
        """As if this process had just begun: with nothing of the driver's, and no call made."""
        self._driver.fakecuda_reset()
        for library in (self._driver, self._nvml):
            library.fakecuda_count_anew()
