"""``weightcached verify MODEL``: are the weights that daemons serve what they should be, bit for bit?

Owns the options, the report and the exit codes; ``verify.py`` compares. It attaches like an engine, so what it looks
at is what engines get, and asks for the daemon's ``current`` weights: that these are MODEL's is what ``--against-disk``
shows. Exit codes: 0 everything is equal · 1 something differs · 2 nothing differs, but not everything could be compared
· 3 there is nothing to verify: no daemon, another configuration, or files that cannot be read · 64 bad options. With
``--json`` an error is one line too, ``{"error": {"code": …, "message": …, …}}``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcached.client.attach import attach
from weightcached.client.verify import Finding, against_disk, against_manifest
from weightcached.protocol.command_line import USAGE_EXIT, Parser, seconds
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.hub import resolve
from weightcached.protocol.memory.chosen import Chosen
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments, allow_list
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.ranks import rank_word
from weightcached.protocol.shard_options import (
    add_device_arguments,
    add_engine_argument,
    add_rank_filters,
    add_shard_arguments,
    home_of,
    parse_with_engine,
    shard_with_key,
    shards_of,
)
from weightcached.protocol.text import binary_size, folded, one_line, table

EQUAL_EXIT, DIFFERS_EXIT, NOT_COMPARED_EXIT, NOTHING_EXIT = range(4)


@dataclass(frozen=True, slots=True)
class Verified:
    """One rank. ``disk`` is ``None`` where it was not asked for."""

    rank: str
    generation: str
    version: str
    nbytes: int
    seconds: float
    manifest: Sequence[Finding]
    disk: Sequence[Finding] | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.manifest, *(self.disk or ()))

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "generation": self.generation,
            "version": self.version,
            "nbytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "manifest": _as_json(self.manifest),
            "disk": None if self.disk is None else _as_json(self.disk),
        }


def main(argv: list[str]) -> int:
    """Print, and return the exit code."""
    given = parse_with_engine(_parser(), argv)
    try:
        verified = verify(given)
    except WeightCacheError as error:
        if given.json:
            print(json.dumps({"error": error.as_fields()}))
        else:
            print(f"weightcached verify: {error}", file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else NOTHING_EXIT
    if given.json:
        print(json.dumps({"ranks": [one.as_json() for one in verified]}))
    else:
        print("\n".join(one_line(line) for line in render(verified)))
    return exit_code(verified)


def exit_code(verified: Sequence[Verified]) -> int:
    """The documented codes; the worst finding decides."""
    verdicts = {finding.verdict for one in verified for finding in one.findings}
    if verdicts & {"differs", "missing", "extra"}:
        return DIFFERS_EXIT
    return NOT_COMPARED_EXIT if "not compared" in verdicts else EQUAL_EXIT


def verify(given: argparse.Namespace) -> list[Verified]:
    """Every rank that is meant. Raises InvalidOption, the errors of an attach, or an error of the checkpoint."""
    shards = shards_of(given)
    model_dir = resolve(given.model)
    return [_verified(model_dir, given, shard, home_of(given, shard)) for shard in shards]


def _verified(model_dir: Path, given: argparse.Namespace, shard: dict[str, Any], home: Chosen) -> Verified:
    shard = shard_with_key(given, shard, model_dir, device=home.device)
    allowed, config = allow_list(given), build_config(model_dir, **shard)
    with attach(
        model_dir,
        **shard,
        device=home.option,
        memory=home.memory,
        mode="require",
        want="current",
        name=given.name or DEFAULT_NAME,
        runtime_dir=given.runtime_dir,
        timeout_s=given.timeout,
        allow_uids=allowed.uids,
        allow_gids=allowed.gids,
        engine_name="weightcached verify",
    ) as weights:
        started_s = time.monotonic()
        manifest = against_manifest(weights)
        disk = against_disk(weights, model_dir, config) if given.against_disk else None
        seconds = time.monotonic() - started_s
        nbytes = weights.manifest.content_nbytes
        return Verified(
            rank_word(config.parallel), weights.generation, weights.version, nbytes, seconds, manifest, disk
        )


def render(verified: Sequence[Verified]) -> list[str]:
    """A row for each rank, then names by verdict: those alike but for numbers are one row, unless they differ."""
    lines = table(
        [
            ("RANK", "GENERATION", "BYTES", "SECONDS", "AGAINST THE MANIFEST", "AGAINST DISK"),
            *(
                (
                    one.rank,
                    one.generation[:12],
                    binary_size(one.nbytes),
                    f"{one.seconds:.1f}",
                    _counted(one.manifest),
                    "-" if one.disk is None else _counted(one.disk),
                )
                for one in verified
            ),
        ]
    )
    for one in verified:
        for against, findings in (("the manifest", one.manifest), ("disk", one.disk or ())):
            if (against == "disk" and findings) or any(finding.verdict != "equal" for finding in findings):
                lines += ["", f"rank {one.rank} against {against}:"]
                lines += table([("PARAMETER", "TIMES", "VERDICT", "WHY"), *_rows(findings)])
    return lines


def _counted(findings: Sequence[Finding]) -> str:
    """``291 equal, 1 differs``."""
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in findings).items())


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    alike = ("equal", "not compared")
    times = Counter((folded(one.name) if one.verdict in alike else one.name, one.verdict, one.why) for one in findings)
    yield from ((name, str(count), verdict, why) for (name, verdict, why), count in times.items())


def _as_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"name": one.name, "verdict": one.verdict, "why": one.why} for one in findings]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached verify",
        description="Attach to the daemons that serve MODEL's ranks and hash every resident parameter against the\n"
        "manifest. With --against-disk also load MODEL anew by a naive reference, which shares nothing with the\n"
        "loader, and compare name by name. Takes the options that the daemons were started with.",
        epilog="exit codes: 0 everything is equal; 1 something differs; 2 nothing differs, but the reference has no\n"
        "rule for some parameters, which were not compared; 3 there is nothing to verify: no daemon, another\n"
        "configuration, or files that cannot be read; 64 bad options",
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, or a hub id")
    add_shard_arguments(parser)
    add_device_arguments(parser)
    add_engine_argument(parser)
    add_rank_filters(parser)
    parser.add_argument("--against-disk", action="store_true", help="compare with MODEL's files too; reads all of them")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S", help="for each attach (default: 600)")
    parser.add_argument("--json", action="store_true", help="every name with its verdict, as one JSON document")
    add_place_arguments(parser, name=NAME_OF_ONE)
    return parser
