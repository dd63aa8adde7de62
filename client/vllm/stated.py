"""What a command that starts vLLM says already: which program it runs, and options that `launch` would add.

Owns how vLLM's parser spells an option: `_` for `-`, `=`, `.key`, abbreviations, and a YAML file of ``--config``.
Starts nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from weightcached.protocol.text import one_line

_FLAGS = re.compile("-[bBdEiIOPqRsSuvx]+|-[WX].+|--check-hash-based-pycs=.+")
_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def runs_module(command: Sequence[str], module: str) -> bool:
    """Whether it is Python with ``-m module``, with nothing but the interpreter's own options before that."""
    if re.fullmatch(r"python[0-9.]*", os.path.basename(command[0])) is None:
        return False
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, None) == module
        if word in _WITH_A_VALUE:
            next(words, None)
        elif _FLAGS.fullmatch(word) is None:
            return False
    return False


def words_of(command: Sequence[str]) -> list[str]:
    """``command`` with what the file of its ``--config`` says before it, as vLLM has it: what comes later counts."""
    path = None
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == "--config":
            path = value if equals else next(iter(command[position + 1 :]), None)
    return [*([] if path is None else _words_in(path)), *command]


def stated(words: Sequence[str], option: str, *, shortest: str) -> str | None:
    """What ``words`` say for ``--option``, in any way that vLLM takes; the last one counts. ``shortest``: the shortest
    abbreviation that is of no other option.
    """
    found = None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = name.partition(".")[0].replace("_", "-")
        if name.startswith(f"--{shortest}") and f"--{option}".startswith(name):
            found = value if equals else next(iter(words[position + 1 :]), "")
    return found


def _words_in(path: str) -> list[str]:
    """Options of a file. One that cannot be read is warned of, and left to vLLM."""
    try:
        import yaml  # comes with vLLM
    except ImportError as error:
        return _not_seen(path, str(error))
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return _not_seen(path, str(error))
    if not isinstance(options, dict):
        return _not_seen(path, f"a mapping of options is expected, not {type(options).__name__}")
    return [f"--{key}={value}" for key, value in options.items()]


def _not_seen(path: str, why: str) -> list[str]:
    print(
        f"weightcached launch: {one_line(path)}: not looked at for a load format and options of the loader: "
        f"{one_line(why)}",
        file=sys.stderr,
    )
    return []
