"""The comparison as a command: a line for every rank, and a line for everything that differs.

    python -m tests.engines [NAME …] [--tp-size N …] [--serve]

NAME is a case of `cases.py`; none are all. With `--serve` our side comes from a daemon, otherwise from the loader in
this process. Exit codes: 0 all the same · 1 something differs, or one side refuses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.engines import checkpoints, engine
from tests.engines.cases import CASES, Case, Rank
from tests.engines.compare import loaded, served
from tests.engines.held import differences
from weightcached.protocol.errors import WeightCacheError


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines", description="Compare with vLLM's own loader.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tp-size", type=int, action="append", metavar="N", help="only these (default: the case's)")
    parser.add_argument("--serve", action="store_true", help="take our side from a daemon")
    given = parser.parse_args(argv)
    known = {case.name: case for case in CASES}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(known)}")
    same = True
    with tempfile.TemporaryDirectory() as folder, engine.running() as vllm:
        for case in [known[name] for name in given.names or known]:
            if case.why_not_here is not None:
                print(f"{case.name}: not compared: {case.why_not_here}", flush=True)
                continue
            model = checkpoints.write(case, Path(folder, case.name))
            for rank in case.ranks():
                if given.tp_size is None or rank.tp_size in given.tp_size:
                    same &= _compare(vllm, case, rank, model, Path(folder, "run") if given.serve else None)
    return 0 if same else 1


def _compare(vllm: engine.Engine, case: Case, rank: Rank, model: Path, runtime_dir: Path | None) -> bool:
    """Print how one rank compares. True if nothing differs."""
    try:
        theirs = vllm.held(model, case, rank)
        ours = loaded(model, case, rank) if runtime_dir is None else served(model, case, rank, runtime_dir)
    except (engine.EngineError, WeightCacheError) as error:
        print(f"{case.name} {rank}: {type(error).__name__}: {error}", flush=True)
        return False
    found = differences(theirs, ours)
    print(f"{case.name} {rank}: {len(theirs)} names, {len(found) or 'no'} differences", flush=True)
    for difference in found:
        print(f"  {difference}", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
