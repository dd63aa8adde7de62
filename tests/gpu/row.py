"""A row of the check: one claim about the device, tried in a process of its own, with a verdict and figures.

Owns the verdicts, what a row is told, and running one. A process each, because a failing claim may cost its process the
device (a fault ends every context's use), and because what a row leaves behind shows when it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["PASS", "FAIL", "SKIPPED"]
MIB = 1 << 20
GIB = 1 << 30


class Skipped(Exception):
    """The claim cannot be tried here; the message says what is missing. Never raised once it is being tried."""


@dataclass(frozen=True)
class Setting:
    """What a row works with. ``rehearsal``: the driver is not a real one: sizes are small and no time is judged."""

    uuid: str
    folder: str
    rehearsal: bool
    alone: bool
    """Whether rows are to be shown this device alone: the program that runs them sees several."""
    sockets: str = "/tmp"
    """Where runtime directories are made: a socket's path has to be short, and ``folder`` is what somebody gave."""

    @property
    def spare_nbytes(self) -> int:
        """By so much may the used memory of a device differ: a real driver keeps some for itself, more or less."""
        return 0 if self.rehearsal else 16 * MIB

    def nbytes(self, real: int) -> int:
        """``real`` on a device; a thousandth in a rehearsal, in whole KiB."""
        return real if not self.rehearsal else max(real // 1000 // 1024, 1) * 1024

    def judged(self, figures: Sequence[str], targets: Mapping[str, bool]) -> str:
        """``figures`` and the claims of time and rate, each with whether it is met; AssertionError with all of these
        where one is missed.
        """
        if self.rehearsal:
            return "; ".join([*figures, *(f"{claim}: not judged in a rehearsal" for claim in targets)])
        said = "; ".join([*figures, *(claim if met else f"MISSED: {claim}" for claim, met in targets.items())])
        require(all(targets.values()), said)
        return said


@dataclass(frozen=True)
class Row:
    """``tries(setting)`` returns figures for the table, raises Skipped, or fails with any other exception."""

    name: str
    claim: str
    tries: Callable[[Setting], str]
    deadline_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    name: str
    claim: str
    verdict: Verdict
    said: str
    seconds: float = 0.0


def require(condition: bool, otherwise: str) -> None:
    """AssertionError ``otherwise``, unless ``condition``; also where Python leaves out its own assertions."""
    if not condition:
        raise AssertionError(otherwise)


def run(row: Row, setting: Setting, *, within_s: float = float("inf")) -> Outcome:
    """The row's outcome, from a process of its own. Blocks until that has ended or been killed, with all that it
    started, at the row's deadline or after ``within_s``.
    """
    allowed_s = min(row.deadline_s, within_s)
    started_s = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{setting.uuid}"} if setting.alone else None
    with subprocess.Popen(
        _command(row, setting),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            answer, complaints = process.communicate(timeout=allowed_s)
        except subprocess.TimeoutExpired:
            _kill_all_of(process)
            answer, complaints = process.communicate()
            complaints += f"\nnot done after {allowed_s:.0f} s"
        except BaseException:  # its session is not this terminal's: Ctrl-C reaches it through here
            _kill_all_of(process)
            raise
    seconds = time.monotonic() - started_s
    if process.returncode == 0:
        said = json.loads(answer.splitlines()[-1])
        return Outcome(row.name, row.claim, said["verdict"], said["said"], seconds)
    last = (complaints.strip().splitlines() or [f"ended with {process.returncode} and no word"])[-1]
    return Outcome(row.name, row.claim, "FAIL", last, seconds)


def _command(row: Row, setting: Setting) -> list[str]:
    return [sys.executable, "-P", "-m", "tests.gpu.runner", "--one-row", row.name, json.dumps(asdict(setting))]


def _kill_all_of(process: subprocess.Popen[str]) -> None:
    """The leader of a session and its daemons and engines, which would hold the device, and the pipes, without it. A
    keeper has a session of its own, and dies with its supervisor.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_here(row: Row, setting: Setting) -> int:
    """Try the row in this process and say on standard output what came of it; the exit status."""
    try:
        verdict, said = "PASS", row.tries(setting)
    except Skipped as reason:
        verdict, said = "SKIPPED", str(reason)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is the row's outcome
        traceback.print_exception(failure)
        verdict, said = "FAIL", f"{type(failure).__name__}: {failure}"
    print(json.dumps({"verdict": verdict, "said": said}), flush=True)
    return 0


def in_words(nbytes: int) -> str:
    """In GiB, or in MiB where it is less than a tenth of one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / MIB:.1f} MiB"


@contextmanager
def child(program: str, *arguments: str, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Another process of the row that runs ``program``, a module, and talks by lines; killed at the end if need be."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line it says; AssertionError when it ends without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(f"a process of this row ended with status {process.wait()} before it answered")
    return line.strip()


def torch_with_cuda() -> None:
    """Skipped, unless torch is here and can use the device."""
    try:
        import torch
    except ImportError:
        raise Skipped("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skipped(f"this build of torch ({torch.__version__}) has no CUDA, or finds no device")


def torch_computes(setting: Setting) -> bool:
    """Whether torch takes the device's memory for what it is. In a rehearsal the host's tensors do that for it."""
    import torch

    return not setting.rehearsal or torch.cuda.is_available()


def folder_of(setting: Setting, name: str) -> Path:
    """A new folder for the row's files, below the run's."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=setting.folder))


def runtime_dir_of(setting: Setting) -> Path:
    """One that a daemon is to make, in a new folder."""
    return Path(tempfile.mkdtemp(prefix="", dir=setting.sockets)) / "run"
