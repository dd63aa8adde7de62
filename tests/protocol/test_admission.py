"""Admission: the tightest of host memory and every cgroup above us decides.

Trees as kernels show them, written into a folder, and one real cgroup.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cgroups import memory_limit
from weightcached.protocol.errors import InsufficientMemory
from weightcached.protocol.memory.admission import HEADROOM_BYTES, admit, rooms

MIB = 1 << 20
V1_UNLIMITED = 9223372036854771712


class Machine:
    """A /proc and cgroup mounts in a folder, written as the kernel writes them."""

    def __init__(self, root: Path, *, available_nbytes: int) -> None:
        self.root = root
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       {64 * MIB * 1024 // 1024} kB\nMemAvailable:   {available_nbytes // 1024} kB\n"
            "HugePages_Total:       0\n"
        )
        self.write(cgroup="", mounts="")

    def write(self, *, cgroup: str, mounts: str) -> None:
        (self.proc / "self/cgroup").write_text(cgroup)
        (self.proc / "self/mountinfo").write_text(mounts)

    def v1(self, path: str, *, limit: int, used: int, file_pages: int = 0) -> None:
        directory = self.root / "v1" / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(
            f"cache 1\ninactive_file 0\ntotal_inactive_file {file_pages}\ntotal_active_file 0\n"
        )

    def v2(self, path: str, *, limit: str | None, used: int = 0, file_pages: int = 0) -> None:
        directory = self.root / "v2" / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        if limit is not None:
            (directory / "memory.max").write_text(f"{limit}\n")
            (directory / "memory.current").write_text(f"{used}\n")
            (directory / "memory.stat").write_text(f"anon 5\ninactive_file {file_pages // 2}\nactive_file 0\n")

    def mounted(self, kind: str, *, root: str = "/") -> str:
        if kind == "v1":
            return f"35 31 0:32 {root} {self.root}/v1 rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        return f"41 31 0:38 {root} {self.root}/v2 rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, available_nbytes=1000 * MIB)


def test_a_host_without_cgroups(machine: Machine) -> None:
    assert [room.free_nbytes for room in rooms(machine.proc)] == [1000 * MIB]
    assert admit(1000 * MIB - HEADROOM_BYTES, proc=machine.proc).free_nbytes == 1000 * MIB
    with pytest.raises(InsufficientMemory, match="MemAvailable"):
        admit(1000 * MIB - HEADROOM_BYTES + 1, proc=machine.proc)


def test_v2_looks_at_every_group_above(machine: Machine) -> None:
    machine.v2("/", limit=None)
    machine.v2("/a", limit=str(300 * MIB), used=100 * MIB)
    machine.v2("/a/b", limit="max", used=50 * MIB)
    machine.write(cgroup="0::/a/b\n", mounts=machine.mounted("v2"))
    assert [room.free_nbytes for room in rooms(machine.proc)] == [1000 * MIB, 200 * MIB]
    with pytest.raises(InsufficientMemory) as refused:
        admit(190 * MIB, proc=machine.proc)
    assert str(refused.value.where).endswith("/v2/a/memory.max")
    assert str(190 * MIB) in str(refused.value.expected)
    assert str(200 * MIB) in str(refused.value.found)


def test_page_cache_is_given_back_and_so_is_free(machine: Machine) -> None:
    machine.v2("/a", limit=str(300 * MIB), used=290 * MIB, file_pages=400 * MIB)  # 200 MiB of it inactive
    machine.write(cgroup="0::/a\n", mounts=machine.mounted("v2"))
    assert rooms(machine.proc)[1].free_nbytes == 210 * MIB


def test_v1_beside_v2(machine: Machine) -> None:
    machine.v1("/", limit=V1_UNLIMITED, used=0)
    machine.v1("/job", limit=400 * MIB, used=30 * MIB, file_pages=10 * MIB)
    machine.v2("/", limit=None)
    machine.write(
        cgroup="9:name=systemd:/\n4:memory:/job\n1:cpu:/\n0::/\n",
        mounts=machine.mounted("v1") + machine.mounted("v2"),
    )
    assert [room.free_nbytes for room in rooms(machine.proc)] == [1000 * MIB, 380 * MIB]


def test_a_container_that_sees_only_its_own_group(machine: Machine) -> None:
    """The path in /proc/self/cgroup is the host's; the mount shows the container's group as its root."""
    machine.v1("/", limit=100 * MIB, used=0)
    machine.write(cgroup="4:memory:/docker/abc\n", mounts=machine.mounted("v1", root="/docker/abc"))
    assert rooms(machine.proc)[1].free_nbytes == 100 * MIB
    machine.write(cgroup="4:memory:/../elsewhere\n", mounts=machine.mounted("v1"))
    assert rooms(machine.proc)[1].free_nbytes == 100 * MIB


def test_more_used_than_allowed_is_no_room_at_all(machine: Machine) -> None:
    machine.v2("/a", limit=str(10 * MIB), used=20 * MIB)
    machine.write(cgroup="0::/a\n", mounts=machine.mounted("v2"))
    assert rooms(machine.proc)[1].free_nbytes == 0


def test_this_machine_is_understood() -> None:
    found = rooms()
    assert found[0].free_nbytes > 0
    assert all(room.free_nbytes >= 0 for room in found)


LIMIT_NBYTES = 256 * MIB
PROGRAM = """
import json, os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
from weightcached.protocol.memory.admission import admit
from weightcached.protocol.errors import InsufficientMemory
admit(64 << 20)
try:
    admit(512 << 20)
except InsufficientMemory as error:
    print(json.dumps(error.as_fields()))
"""


@pytest.mark.root
def test_a_real_cgroup_limits_a_real_process() -> None:
    with memory_limit(LIMIT_NBYTES) as group:
        command = [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs")]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    refused = json.loads(result.stdout)
    assert refused["code"] == "insufficient_memory"
    assert str(LIMIT_NBYTES) in refused["found"]
    assert group.name in refused["where"]
