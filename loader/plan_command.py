"""``weightcached plan MODEL``: what would be loaded, from headers alone. Reads no weight and needs no memory for any.

Owns the options, the order of things and the exit codes; the plan is the loader's own, the same that a worker carries
out, and ``plan_report.py`` says what it says. Exit codes: 0 planned · 1 there is no plan: the checkpoint's files are
wrong, or the layout does not know the model · 64 bad options. With ``--json`` an error is one line too, ``{"error":
{"code": …, "message": …, …}}``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile

from weightcached.loader import pipeline
from weightcached.loader.checkpoint import open_checkpoint
from weightcached.loader.plan_report import RankSummary, checkpoint_document, rank_document, render, summarize
from weightcached.protocol.command_line import USAGE_EXIT, Parser
from weightcached.protocol.config import build_config
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.hub import resolve
from weightcached.protocol.shard_options import add_rank_filters, add_shard_arguments, shards_of

_NO_PLAN_EXIT = 1


def main(argv: list[str]) -> int:
    """Print the plan; the exit code."""
    given = _parser().parse_args(argv)
    try:
        _print_json(given) if given.json else _print_tables(given)
    except WeightCacheError as error:
        if given.json:
            print(json.dumps({"error": error.as_fields()}))
        else:
            print(f"weightcached plan: {error}", file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else _NO_PLAN_EXIT
    return 0


def _print_tables(given: argparse.Namespace) -> None:
    """What people read of all ranks that are meant. One plan at a time is kept.

    Raises InvalidOption, UnsupportedModel, or an error of the checkpoint.
    """
    shards = shards_of(given)
    model_dir = resolve(given.model)
    with open_checkpoint(model_dir) as checkpoint:
        summaries: list[RankSummary] = []
        for shard in reversed(shards):  # the first is the one that is shown
            prepared = pipeline.prepare(checkpoint, build_config(model_dir, **shard))
            summaries.insert(0, summarize(prepared))
        print("\n".join(render(checkpoint_document(checkpoint), summaries, prepared)))


def _print_json(given: argparse.Namespace) -> None:
    """The document of all ranks that are meant: in a file until all are planned, since an error would be the document.

    As text it is hundreds of bytes a parameter and rank; in memory there is never more than one rank's plan.
    """
    shards = shards_of(given)
    model_dir = resolve(given.model)
    with open_checkpoint(model_dir) as checkpoint, tempfile.TemporaryFile("w+") as spool:
        spool.write(json.dumps(checkpoint_document(checkpoint)).removesuffix("}"))
        spool.write(', "ranks": [')
        for number, shard in enumerate(shards):
            prepared = pipeline.prepare(checkpoint, build_config(model_dir, **shard))
            spool.write(", " if number else "")
            spool.writelines(rank_document(summarize(prepared), prepared))
        spool.write("]}\n")
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout, 1 << 20)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached plan",
        description="Show what a rank's load would be: what goes where, how many bytes are read and kept, and what is\n"
        "ignored and why. Reads the headers of the checkpoint's files and no weight.",
        epilog="READ is the most that is asked of the files; KEPT is what becomes part of a parameter.\n\n"
        "exit codes: 0 planned; 1 there is no plan: the checkpoint's files are wrong, or the layout does not know the\n"
        "model; 64 bad options",
    )
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, or a hub id")
    add_shard_arguments(parser)
    add_rank_filters(parser)
    parser.add_argument("--json", action="store_true", help="everything, parameter by parameter, as one JSON document")
    return parser
