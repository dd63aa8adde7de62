"""An engine that restarts all the time: attaches, compares every byte with the disk, lets go, again. Runs in the box.

    python attach_loop.py MODEL RANK SIZE ALLOWED_UID

Prints one line of JSON for each attach, the first after the weights were read from disk to compare with. Ends when its
standard input does; any error at all ends it with a line that says so, and status 1.
"""

import json
import select
import sys
import time
from typing import Any

import torch

from weightcached.client import attach


def main() -> int:
    model, rank, size, uid = sys.argv[1:]
    options: dict[str, Any] = {"layout": "fused", "tp_rank": int(rank), "tp_size": int(size), "allow_uids": [int(uid)]}
    torch.set_num_threads(1)
    try:
        with attach(model, mode="off", **options) as disk:
            expected = dict(disk)
            while not select.select([sys.stdin], [], [], 0)[0]:
                print(json.dumps(once(model, expected, options)), flush=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def once(model: str, expected: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """One attach. In mode `client`, where a daemon that seemed absent would be a fallback that shows here."""
    begun = time.monotonic()
    with attach(model, mode="client", timeout_s=60.0, **options) as weights:
        seconds = time.monotonic() - begun
        if set(weights) != set(expected):
            raise AssertionError("other names")
        wrong = [name for name in expected if not torch.equal(weights[name], expected[name])]
        if wrong:
            raise AssertionError(f"wrong bytes in {wrong}")
        return {"generation": weights.generation, "source": weights.source, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
