"""Owns what an engine was asked for: the command line of `weightcached engine` as one frozen value.

Validates words and ranges; looks at no file, daemon or model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from weightcached.client.attach_options import add_attach_arguments
from weightcached.protocol.command_line import Parser, user_id, whole_number
from weightcached.protocol.memory.chosen import CPU, HOST, Memory, chosen
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.shard_options import add_device_arguments

Mode = Literal["off", "client", "require", "daemon"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Layout = Literal["hf", "transformers"]

DEFAULT_PORT = 8000
EXIT_CODES = """\
exit codes:
    0  done, or stopped by SIGTERM or SIGINT while serving (130 or 143: while starting)
    2  configuration: the daemon has another config or checkpoint; a model that this engine cannot serve
    3  deployment: daemon absent, dead, failed or not trusted; the port is taken
    4  the daemon was not ready in time
    5  the contract was broken: report it
    6  the checkpoint's files are wrong
   64  bad options
   70  a bug
   75  the daemon serves other weights than at the start, and --on-stale is exit
"""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine. ``port`` is ``None`` for one that answers ``prompt`` and ends; 0 lets the kernel choose."""

    model: str
    mode: Mode = "client"
    prompt: str | None = None
    max_new_tokens: int = 32
    port: int | None = None
    name: str = DEFAULT_NAME
    runtime_dir: str | None = None
    dtype: Dtype = "auto"
    layout: Layout = "hf"
    device: str = CPU
    memory: Memory | None = None
    """``None``: the device's own kind."""
    digest: str | None = None
    timeout_s: float = 600.0
    wait_for_daemon_s: float = 0.0
    on_stale: Literal["keep", "exit"] = "keep"
    follow: bool = False
    allow_uids: Sequence[int] = ()
    """Trusted as the daemon's user, beside root and our own."""
    token_ids: bool = False
    json: bool = False


def parse(argv: Sequence[str]) -> EngineOptions:
    """Options from the command line. Exits with :data:`USAGE_EXIT` when they cannot be understood."""
    parser = _parser()
    given = {word: value for word, value in vars(parser.parse_args(argv)).items() if value is not None}
    if not {"prompt", "port"} & given.keys():
        given["port"] = DEFAULT_PORT
    return EngineOptions(**given)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weightcached engine",
        description="A small engine on Transformers: text from decoders, embeddings from encoders. With --prompt it\n"
        "answers and ends; with --port (or neither) it serves HTTP on loopback.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--model", required=True, metavar="DIR|ID", help="a checkpoint directory, or a hub id")
    _add_serving(parser)
    _add_weights(parser)
    return parser


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """What it is asked, and how it answers."""
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="answer this first; without --port, then end")
    add("--max-new-tokens", type=whole_number(1, 1 << 20), default=32, metavar="N", help="default: %(default)s")
    add(
        "--port",
        type=whole_number(0, 65535),
        metavar="P",
        help=f"serve HTTP on 127.0.0.1:P; 0 takes a free one (default: {DEFAULT_PORT} without --prompt)",
    )
    add("--token-ids", action="store_true", help="print the token ids beside the text")
    add("--json", action="store_true", help="one JSON line on standard output instead of text and table")


def _add_weights(parser: argparse.ArgumentParser) -> None:
    """Which weights it computes with, and where they come from."""
    add = parser.add_argument
    add(
        "--weight-cache-mode",
        dest="mode",
        choices=get_args(Mode),
        default="client",
        help="off: Transformers loads from disk itself; client: from the daemon, from disk where there is no socket; "
        "require: from the daemon or not at all; daemon: start a daemon and own it (it ends with this engine) "
        "(default: %(default)s)",
    )
    add("--name", default=DEFAULT_NAME, help="the daemon's name in its runtime directory (default: %(default)s)")
    add("--runtime-dir", metavar="DIR", help="default: $WEIGHTCACHED_RUNTIME_DIR, else /run/weightcached")
    add("--dtype", choices=get_args(Dtype), default="auto", help="auto: as on disk (default: %(default)s)")
    add(
        "--layout",
        choices=get_args(Layout),
        default="hf",
        help="transformers: the state that Transformers makes, of any model, from a daemon with --engine transformers; "
        "hf: the checkpoint's own tensors (default: %(default)s)",
    )
    add_device_arguments(parser)
    add_attach_arguments(parser)
    add(
        "--follow",
        action="store_true",
        help="take whatever the daemon has committed, and switch to what it publishes later, between two answers "
        "(default: exactly the checkpoint's content, until the end)",
    )
    add(
        "--allow-uid",
        dest="allow_uids",
        metavar="USER",
        type=user_id,
        action="append",
        default=[],
        help="trust a daemon of this user too (repeatable)",
    )


def serve_command(options: EngineOptions, model_dir: str | os.PathLike[str]) -> list[str]:
    """Arguments of `weightcached serve` for the daemon that serves exactly what ``options`` will ask for. Raises
    DeviceAbsent for a GPU that this process does not see.
    """
    words = ["serve", "--model", os.fspath(model_dir)]
    words += ["--layout", "hf"] if options.layout == "hf" else ["--engine", options.layout]
    words += ["--dtype", options.dtype, "--name", options.name]
    home = chosen(options.device, options.memory)
    if home != HOST:
        words += ["--device", home.option, "--memory", home.memory]
    if options.runtime_dir is not None:
        words += ["--runtime-dir", options.runtime_dir]
    return words
