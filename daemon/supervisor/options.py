"""What ``weightcached supervise`` may be told. Owns its options and their help; runs nothing.

Apart from ``daemon/options.py``, whose imports would cost the supervisor more memory than everything else it does.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from weightcached.protocol.command_line import Parser, positive_seconds, seconds, whole_number
from weightcached.protocol.processes import python_command

_EXAMPLES = """\
The program is `serve` with its options, or any program that becomes the keeper by exec:
  weightcached supervise --watchdog 10 -- serve --model DIR
  weightcached supervise -- numactl --membind=0 weightcached serve --model DIR

exit codes: the keeper's, when it exits with 0 or was told to stop (128 + the signal's number where a
signal killed it); 0 when told to stop while no keeper runs; 64 or 127 when the keeper's options or its
program cannot be used and nothing is kept; 1 the supervisor itself cannot start; 64 bad options."""


@dataclass(frozen=True, kw_only=True)
class SuperviseOptions:
    """Valid options."""

    command: tuple[str, ...]
    """What is run, ready for exec."""
    watchdog_s: float | None
    stop_timeout_s: float
    backoff_max_s: float
    backoff_reset_s: float
    store_max: int
    log_format: str
    log_level: str
    parent_pid: int | None


def parse(argv: list[str]) -> SuperviseOptions:
    """The options before ``--`` and the command after it. Exits with usage where they cannot be used."""
    parser = _parser()
    if "--" not in argv:
        given = parser.parse_args(argv)  # for --help, and for what is wrong with the options
        parser.error("-- and the program to supervise are expected")
    split = argv.index("--")
    given, program = parser.parse_args(argv[:split]), argv[split + 1 :]
    if not program:
        parser.error("a program is expected after --")
    return SuperviseOptions(
        command=_command(program),
        watchdog_s=given.watchdog,
        stop_timeout_s=given.stop_timeout,
        backoff_max_s=given.backoff_max,
        backoff_reset_s=given.backoff_reset,
        store_max=given.store_max,
        log_format=given.log_format,
        log_level=given.log_level,
        parent_pid=given.parent_pid,
    )


def _command(program: list[str]) -> tuple[str, ...]:
    if program[0] == "serve":
        return tuple(python_command("weightcached.daemon", *program))
    return tuple(program)


def _parser() -> Parser:
    parser = Parser(
        prog="weightcached supervise",
        description="Run a keeper and start it again whenever it dies, handing back the descriptors of its weights,\n"
        "so that it serves again in a moment. For containers (also as PID 1) and shells; systemd\n"
        "does the same for its services. The weights are gone when this process is.",
        epilog=_EXAMPLES,
    )
    parser.usage = "weightcached supervise [options] -- serve …"
    parser.add_argument(
        "--watchdog",
        type=positive_seconds,
        metavar="S",
        help="kill a keeper that gives no sign of life for so long (default: never; below another service manager, "
        "that one's interval)",
    )
    parser.add_argument(
        "--stop-timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="how long after the second SIGTERM or SIGINT the keeper is killed (default: 10)",
    )
    parser.add_argument(
        "--backoff-max", type=seconds, default=10.0, metavar="S", help="longest pause between two starts (default: 10)"
    )
    parser.add_argument(
        "--backoff-reset",
        type=positive_seconds,
        default=60.0,
        metavar="S",
        help="a life of this length is a good one: the next start has no pause (default: 60)",
    )
    parser.add_argument(
        "--store-max",
        type=whole_number(1),
        default=1024,
        metavar="N",
        help="descriptors to keep at most (default: 1024)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )
    parser.add_argument("--parent-pid", type=whole_number(1), help=argparse.SUPPRESS)  # `up`: die with that process
    return parser
