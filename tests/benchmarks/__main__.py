"""The command: chosen benchmarks, one after the other, their tables as they come, and the results in files.

    python -m tests.benchmarks [attach|holder|load|plan|push|reads|restart|shards|swap|touch|update …]
                               [--quick] [--gib G] [--rounds N] [--no-settle] [--dir DIR] [--out DIR]

Exit codes: 0 all ran (met targets or not) · 1 one could not run · 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import machine, report
from tests.benchmarks.fresh import ROOT
from tests.benchmarks.outcome import Outcome, Settings
from tests.benchmarks.workspace import Workspace

BENCHMARKS = ("attach", "holder", "load", "plan", "push", "reads", "restart", "shards", "swap", "touch", "update")


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    settings = Settings(
        quick=given.quick,
        load_gib=given.gib or (0.25 if given.quick else 2.0),
        asked_gib=given.gib,
        rounds=given.rounds or (1 if given.quick else 5),
        settle=not given.no_settle,
    )
    facts = machine.facts(argv)
    print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    outcomes: list[Outcome] = []
    try:
        with Workspace(given.dir) as workspace:
            for name in given.benchmarks or BENCHMARKS:
                outcomes.append(_run(name, settings, workspace))
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted by {interrupt}; nothing is left running", file=sys.stderr)
        return 130
    print("\n" + report.text(report.targets_table([target for outcome in outcomes for target in outcome.targets])))
    as_json, as_markdown = report.write(given.out, facts, outcomes)
    print(f"\nwritten: {as_json} and {as_markdown}")
    return 0


def _run(name: str, settings: Settings, workspace: Workspace) -> Outcome:
    began_s = time.monotonic()
    report.say(f"{name} …")
    outcome: Outcome = importlib.import_module(f"tests.benchmarks.{name}").run(settings, workspace)
    for table in outcome.tables:
        print("\n" + report.text(table), flush=True)
    report.say(f"{name}: {time.monotonic() - began_s:.0f} s")
    return outcome


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="smaller, once, in about a minute: proves that it runs")
    parser.add_argument("--gib", type=float, metavar="G", help="size of what is loaded (default: 2) or swapped (8)")
    parser.add_argument("--rounds", type=int, metavar="N", help="loads of each kind (default: 5)")
    parser.add_argument("--no-settle", action="store_true", help="load into whatever memory the system has (settle.py)")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="for temporary checkpoints (default: as tempfile says)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=ROOT / "build" / "benchmarks", help="for results")
    given = parser.parse_args(argv)
    if unknown := set(given.benchmarks) - set(BENCHMARKS):
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
