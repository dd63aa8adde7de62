"""The ``weightcached`` command: a table of subcommands, each imported by name when it is asked for.

Owns the table, ``--version`` and the overview. The only place that knows of every part; each subcommand's options and
exit codes are its own module's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from weightcached.daemon.output import status_of
from weightcached.daemon.stopping import stop_signals
from weightcached.protocol.command_line import INTERRUPTED_EXIT, USAGE_EXIT

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("weightcached.daemon.serve:main", "load one rank's weights and serve them"),
    "up": ("weightcached.daemon.up:main", "serve all ranks of a model on this host, in the foreground"),
    "supervise": (
        "weightcached.daemon.supervise:main",
        "run `serve`, start it again when it dies, and keep its weights meanwhile",
    ),
    "status": ("weightcached.daemon.status:main", "show every daemon of a runtime directory"),
    "exporter": ("weightcached.daemon.exporter:main", "metrics of every daemon of a runtime directory, at one address"),
    "wait": ("weightcached.daemon.wait:main", "return when places are ready"),
    "update": (
        "weightcached.client.control.commands:update_main",
        "load other weights at all ranks, and switch: all or none",
    ),
    "rollback": ("weightcached.client.control.commands:rollback_main", "serve earlier weights again at all ranks"),
    "generations": (
        "weightcached.client.control.held_commands:generations_main",
        "show what every rank holds, and what is under way",
    ),
    "pin": ("weightcached.client.control.held_commands:pin_main", "keep a version, whatever would have it freed"),
    "unpin": ("weightcached.client.control.held_commands:unpin_main", "keep it no longer than needed"),
    "drop": ("weightcached.client.control.held_commands:drop_main", "free a version that is not served"),
    "events": ("weightcached.client.control.events_command:main", "tell what happens at the daemons, as it happens"),
    "ctl": ("weightcached.client.control.ctl_command:main", "one command to one or many daemons, answers as JSON"),
    "release": ("weightcached.daemon.release:main", "give up cached weights: memory, vault and socket file"),
    "install-units": ("weightcached.daemon.install_units:main", "put the systemd files where systemd looks"),
    "plan": ("weightcached.loader.plan_command:main", "show what would be loaded, from the files' headers alone"),
    "verify": (
        "weightcached.client.verify_command:main",
        "compare what daemons serve with its manifest, and with disk",
    ),
    "snapshot": (
        "weightcached.client.snapshot_command:main",
        "save a rank's finished shard to disk; load it to try it",
    ),
    "digest": ("weightcached.protocol.digests:main", "print the digest of a checkpoint's content"),
    "launch": ("weightcached.client.vllm.launch:main", "start vLLM with its weights from the daemon"),
    "engine": ("weightcached.client.engine.command:main", "a small inference server on Transformers"),
    "demo": ("weightcached.client.demo.command:main", "the whole story on this machine, with a table of seconds"),
}
"""Subcommand → ("module:function", one line of help). The function takes the arguments and returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status. 64 when there is no such command, 130 when it was interrupted and has no
    other answer to that, 141 or 74 when its output cannot be written (``output.py``).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = f"weightcached {arguments[0]}" if arguments and arguments[0] in COMMANDS else "weightcached"
    try:
        return status_of(command, lambda: _run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"weightcached {version('weightcached')}")
        return 0
    if arguments and arguments[0] in COMMANDS:
        if arguments[0] == "serve":
            stop_signals(block=True)  # until the keeper can stop in order, its imports included
        module, _, function = COMMANDS[arguments[0]][0].partition(":")
        status: int = getattr(import_module(module), function)(arguments[1:])
        return status
    asked = not arguments or arguments[0] in ("-h", "--help", "help")
    print(overview(), file=sys.stdout if asked else sys.stderr)
    if not asked:
        print(f"\nweightcached: no such command: {arguments[0]}", file=sys.stderr)
    return 0 if asked else USAGE_EXIT


def overview() -> str:
    """What is printed by ``weightcached --help``."""
    lines = ["usage: weightcached COMMAND [options]        (weightcached COMMAND --help, weightcached --version)", ""]
    lines += [f"  {name:13} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(lines)
