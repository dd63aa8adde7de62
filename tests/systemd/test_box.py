"""The box itself: a real systemd, and nothing of it is left."""

import os
from pathlib import Path

import pytest

from tests.systemd.box import missing, running_box

pytestmark = [pytest.mark.root, pytest.mark.skipif(missing() is not None, reason=missing() or "")]


def groups() -> set[str]:
    return {line.split(":")[-1] for line in Path("/proc/self/cgroup").read_text().splitlines()}


def test_nothing_of_a_box_is_left() -> None:
    mounts, mine = Path("/proc/self/mountinfo").read_text(), groups()
    marker = f"/wc-box-test-{os.getpid()}"
    with running_box() as box:
        assert box.run("systemctl", "is-system-running", ok=False).stdout.strip() in ("running", "degraded")
        box.write(marker, "seen only in there")
        assert box.run("cat", marker).stdout == "seen only in there"
        sleeper = box.run("systemd-run", "--unit=sleeper", "sleep", "infinity")
        assert sleeper.returncode == 0
        inside = box.main_pid("sleeper.service")
        assert os.path.exists(f"/proc/{inside}")
        first = box.pid
    assert not os.path.exists(f"/proc/{inside}")
    assert not os.path.exists(f"/proc/{first}")
    assert not os.path.exists(marker)
    assert (Path("/proc/self/mountinfo").read_text(), groups()) == (mounts, mine)
