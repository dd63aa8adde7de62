"""The command: a run of so many seconds under a seed, and what it survived. Exit status 1 when something is broken.

As root it runs among mounts of its own, where the digest cache has a file system that can be filled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.chaos.report import render
from tests.faults.chaos.runner import ALL_FAULTS, Plan, run
from tests.faults.chaos.world import DIGESTS_TMPFS, GROUPS
from weightcached.client.stopping import raising_stopped

_MOUNT_POINT = Path("/mnt")
_SMALL_DISK_KIB = 256


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--faults", type=int, help="at most so many")
    parser.add_argument("--only", action="append", default=[], choices=[kind.name() for kind in ALL_FAULTS])
    parser.add_argument("--in-turn", action="store_true", help="one fault after the other instead of at random")
    parser.add_argument("--group", action="append", default=[], choices=GROUPS, help="only this; may be said again")
    parser.add_argument("--no-hostile", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="print no line for each fault")
    given = parser.parse_args()
    if DIGESTS_TMPFS not in os.environ and _may_mount():
        _become_with_small_disk()
    plan = Plan(
        seed=given.seed,
        seconds=given.seconds,
        faults_max=given.faults,
        only=given.only,
        in_turn=given.in_turn,
        hostile=not given.no_hostile,
        groups=given.group or GROUPS,
    )
    small_disk = "with" if DIGESTS_TMPFS in os.environ else "without (that needs root and mounts)"
    print(f"seed {plan.seed}, {small_disk} a disk that can be filled", flush=True)
    with raising_stopped():
        outcome = run(plan, say=not given.quiet)
    print(render(outcome), flush=True)
    if outcome.stopped is not None:
        return outcome.stopped.exit_status
    return 1 if outcome.broken is not None else 0


def _may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def _become_with_small_disk() -> None:
    """This program again, in a mount namespace with a tiny file system that goes when the last process in it does."""
    mount = f"mount -t tmpfs -o size={_SMALL_DISK_KIB}k,mode=0700 chaos {_MOUNT_POINT}"
    script = f'{mount} && exec "$@"'
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh"]
    os.environ[DIGESTS_TMPFS] = str(_MOUNT_POINT)
    os.execvp(command[0], [*command, sys.executable, "-m", "tests.faults.chaos", *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
