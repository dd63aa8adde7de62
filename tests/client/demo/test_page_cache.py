import mmap
import os
import tempfile
from pathlib import Path

import pytest

from weightcached.client.demo.page_cache import cached_fraction, drop
from weightcached.protocol.filesystems import file_system_of

SIZE = 8 * 1024 * 1024


def test_a_file_in_memory_stays_and_is_said_to(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        assert drop([Path(file.name)]) == 1.0


def test_a_file_on_disk_is_dropped_and_comes_back_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    assert cached_fraction([path]) == 1.0
    if _in_memory(tmp_path):
        pytest.skip("the temporary folder is in memory")
    assert drop([path]) < 0.05
    path.read_bytes()
    assert cached_fraction([path]) == 1.0


def test_pages_that_somebody_has_mapped_are_counted_as_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert sum(view[at] for at in range(0, SIZE, mmap.PAGESIZE)) >= 0
        assert drop([path]) > 0.5


def test_an_empty_file_and_none_at_all_are_not_cold(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_fraction([tmp_path / "empty"]) == 1.0
    assert cached_fraction([]) == 1.0


def _in_memory(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return file_system_of(fd) in ("tmpfs", "ramfs")
    finally:
        os.close(fd)
