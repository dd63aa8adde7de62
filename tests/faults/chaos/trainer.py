"""A trainer under chaos: pushes a variant to a group, whole or its head alone, and says what version that made.

    python -m tests.faults.chaos.trainer --variant DIR [--partial] --runtime-dir DIR --name NAME --parent-pid PID

Says ``pushing`` before the first tensor and ``published`` or ``refused`` at the end, one JSON object a line. Exit
status 1 when nothing was changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ml_dtypes

from tests.faults.chaos.engine import say
from tests.faults.chaos.variants import HEAD, read_tensors
from weightcached.client.publish import stage
from weightcached.protocol.errors import WeightCacheError
from weightcached.protocol.processes import die_with_parent

TIMEOUT_S = 60.0
_BUCKET_NBYTES = 64 * 1024


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--variant", "--runtime-dir", "--name"):
        parser.add_argument(name, required=True)
    parser.add_argument("--partial", action="store_true")
    parser.add_argument("--parent-pid", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent_pid)
    tensors = read_tensors(Path(given.variant))
    names = [HEAD] if given.partial else list(tensors)
    try:
        with stage(
            partial=given.partial,
            runtime_dir=given.runtime_dir,
            name=given.name,
            timeout_s=TIMEOUT_S,
            bucket_nbytes=_BUCKET_NBYTES,
            bucket_count=2,
        ) as publication:
            say("pushing")
            for name in names:
                publication.push(name, tensors[name].view(ml_dtypes.bfloat16))
            version = publication.commit()
    except WeightCacheError as error:
        say("refused", code=error.code, message=str(error))
        return 1
    say("published", version=version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
