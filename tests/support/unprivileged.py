"""Running a program as a user without rights, for tests of permissions and peers. Callers start and end the process.

A tree that only root may enter (a Python under `/root`, a clone in a 0700 folder) would keep such a user from even
starting this interpreter. The command therefore runs in a mount namespace of its own, where these trees are laid
open at the same paths; nothing changes for anybody else. Sockets, `/proc`, `/tmp` and process ids are the machine's.
"""

import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534

ROOT = Path(__file__).resolve().parents[2]


def command_as(uid: int, argv: Sequence[str | Path]) -> list[str]:
    """The command that runs `argv` as user and group `uid`, in `/`, with no group beside it and no capability.

    Needs root and util-linux. Every step replaces the process (exec): the id of what is started is the program's.
    """
    identity = [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--bounding-set=-all",
        "--no-new-privs",
    ]
    program = [*identity, "--", *(str(word) for word in argv)]
    barriers = _barriers({Path(sys.prefix), Path(sys.base_prefix), ROOT})
    script = "\n".join(
        ["set -e", "cd /", *(_lay_open(*item) for item in barriers.items()), f"exec {shlex.join(program)}"]
    )
    if barriers:
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", script]
    return ["sh", "-c", script]


@contextmanager
def folder_for_everyone() -> Iterator[Path]:
    """A temporary folder, removed at the end, that every user can enter and list. (`tmp_path` lies behind 0700.)"""
    with tempfile.TemporaryDirectory(prefix="weightcached-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def _barriers(trees: set[Path]) -> dict[Path, set[Path]]:
    """The outermost folders that others may not enter on the way to `trees`, each with what must be seen behind it."""
    barriers: dict[Path, set[Path]] = {}
    for tree in (path.resolve() for path in trees):
        for folder in reversed((tree, *tree.parents)):
            if not folder.stat().st_mode & stat.S_IXOTH:
                behind = {tree} if folder != tree else {entry for entry in tree.iterdir() if entry.is_dir()}
                barriers.setdefault(folder, set()).update(behind)
                break
    return barriers


def _lay_open(barrier: Path, trees: set[Path]) -> str:
    """Shell lines that cover `barrier` with an empty folder for everyone in which `trees` lie at their own paths."""
    lines = ["stage=$(mktemp -d)", 'mount -t tmpfs -o mode=755,size=1m tmpfs "$stage"']
    for tree in sorted(trees):
        place = f'"$stage"/{shlex.quote(str(tree.relative_to(barrier)))}'
        lines += [f"mkdir -p {place}", f"mount --rbind {shlex.quote(str(tree))} {place}"]
    return "\n".join([*lines, f'mount --move "$stage" {shlex.quote(str(barrier))}', 'rmdir "$stage"'])
