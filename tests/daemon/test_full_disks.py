"""A file system that takes nothing any more keeps a daemon from starting with a reason, and not as a bug."""

from pathlib import Path

import pytest

from tests.support.mounts import in_mount_namespace

PROGRAM = """
import json
from pathlib import Path
from weightcached.protocol.errors import WeightCacheError
try:
    ATTEMPT
except WeightCacheError as error:
    print(json.dumps([error.code, error.found]))
"""

TAKE = """from weightcached.daemon.claim import take
    from weightcached.protocol.peers import AllowList
    from weightcached.protocol.places import Place
    take(Place(Path.cwd() / "disk", "default", "host-tp0of1"), AllowList())"""

MAILBOX = """from weightcached.daemon.supervisor.mailbox import Mailbox
    Mailbox(Path("/mnt"))  # short: a socket goes there"""


@pytest.mark.root
def test_a_full_runtime_directory(tmp_path: Path) -> None:
    """Directories and empty files still fit into a full tmpfs; the holder's name in the lock file does not."""
    setup = "mkdir disk; mount -t tmpfs -o size=64k,mode=755 tmpfs disk; head -c 1M /dev/zero >disk/all || true"
    answer = in_mount_namespace(setup, PROGRAM.replace("ATTEMPT", TAKE), tmp_path)
    assert answer == ["invalid_place", "No space left on device"]


@pytest.mark.root
def test_a_supervisor_whose_temporary_folder_is_read_only(tmp_path: Path) -> None:
    """Nor does the clean-up of what could not be made hide the reason."""
    setup = "mount -t tmpfs -o ro tmpfs /mnt"
    answer = in_mount_namespace(setup, PROGRAM.replace("ATTEMPT", MAILBOX), tmp_path)
    assert answer == ["invalid_environment", "Read-only file system"]
