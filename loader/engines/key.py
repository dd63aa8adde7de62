"""The key of an engine, for the keeper, which imports none: a helper process of the worker's kind.

``python -P -m weightcached.loader.engines.key --engine NAME --request JSON`` prints one line, ``{"revision": …,
"entries": {…}}`` or ``{"error": {…}}``. Owns that line and how a request is written in it; what a key is, is the
adapter's to say. What the engine prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest, engine_key
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.frozen import thaw
from weightcached.protocol.processes import die_with_parent


def answer(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """What is printed. Imports the adapter, and perhaps the engine."""
    try:
        key = engine_key(
            name,
            EngineRequest(
                model_dir=Path(request["model_dir"]),
                parallel=Parallel.model_validate(request["parallel"]),
                dtype=request["dtype"],
                device=request["device"],
                arguments=tuple(request["arguments"]),
            ),
        )
    except WeightCacheError as error:
        return {"error": error.as_fields()}
    return {"revision": key.revision, "entries": thaw(key.entries)}


def main(argv: list[str]) -> int:
    """One line of JSON on standard output; 0, or 1 where it is an error."""
    parser = argparse.ArgumentParser(prog="python -m weightcached.loader.engines.key", description=__doc__)
    parser.add_argument("--engine", required=True, metavar="NAME")
    parser.add_argument("--request", required=True, type=json.loads, metavar="JSON")
    parser.add_argument("--die-with-parent", type=int, metavar="PID")
    given = parser.parse_args(argv)
    if given.die_with_parent is not None:
        die_with_parent(given.die_with_parent)
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        answered = answer(given.engine, given.request)
        print(json.dumps(answered), file=output, flush=True)
    return 1 if "error" in answered else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # the keeper waits for the end, and taking an engine down in order takes seconds
