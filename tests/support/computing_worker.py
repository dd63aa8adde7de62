"""The worker with a torch that computes on the GPU of the driver that needs none, which torch without CUDA cannot.

Started by daemons that are started by :data:`COMPUTING`, with the repository's root in ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

COMPUTING = (
    sys.executable,
    "-c",
    "import sys; from weightcached.daemon import cli, worker_process; "
    "worker_process.WORKER_MODULE = 'tests.support.computing_worker'; sys.exit(cli.main(sys.argv[1:]))",
)
"""The command `weightcached`, whose workers are this."""


def _computing_on(device: object) -> Any:
    from tests.support.host_pointers import HostPointers

    return HostPointers(), "the host's processors, over the same addresses"


if __name__ == "__main__":
    from weightcached.loader import computing, worker

    computing.computing_on = _computing_on
    status = worker.main()
    sys.stderr.flush()
    os._exit(status)
