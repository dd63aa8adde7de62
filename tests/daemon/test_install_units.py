"""`weightcached install-units`: where files go, what is left alone, and what is refused. `tests/systemd` runs them."""

import os
import re
import stat
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

import pytest

from tests.support.unprivileged import ROOT
from weightcached.daemon.install_units import SHIPPED_EXECUTABLE, closed_folders, main

UNITS = "usr/local/lib/systemd/system"
INSTALLED = {
    f"{UNITS}/weightcached@.service",
    f"{UNITS}/weightcached.target",
    f"{UNITS}/weightcached-exporter.service",
    f"{UNITS}/weightcached-engine-example.service",
    "usr/local/lib/sysusers.d/weightcached.conf",
    "usr/local/lib/tmpfiles.d/weightcached.conf",
    "etc/weightcached/weightcached.env",
}
PRESERVE = f"{UNITS}/weightcached@.service.d/50-preserve.conf"
EXECUTABLE = Path(sysconfig.get_path("scripts")) / "weightcached"


def install(root: Path, *more: str, version: int = 252) -> int:
    return main(["--root", str(root), "--systemd-version", str(version), *more])


def installed(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_every_file_goes_where_systemd_looks_and_starts_this_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path) == 0
    assert installed(tmp_path) == INSTALLED
    output = capsys.readouterr().out
    for name in INSTALLED:
        path = tmp_path / name
        assert f"wrote {path}" in output
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert SHIPPED_EXECUTABLE not in path.read_text()
    lines = (tmp_path / UNITS / "weightcached@.service").read_text().splitlines()
    [start] = [line for line in lines if line.startswith("ExecStart=")]
    assert start.split()[0] == f"ExecStart={EXECUTABLE}"


def test_what_was_shipped_is_what_is_installed(tmp_path: Path) -> None:
    """Beside Python's own, every file of the folder is installed somewhere, or is the documentation."""
    install(tmp_path, version=254)
    shipped = {path.name: path.read_bytes() for path in (ROOT / "systemd").iterdir() if path.is_file()}
    for name in ("__init__.py", "py.typed", "README.md"):
        assert shipped.pop(name) == files("weightcached.systemd").joinpath(name).read_bytes()
    contents = [
        (tmp_path / name).read_bytes().replace(str(EXECUTABLE).encode(), SHIPPED_EXECUTABLE.encode())
        for name in installed(tmp_path)
    ]
    assert sorted(shipped.values()) == sorted(contents)


def test_settings_are_never_overwritten_and_the_rest_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path)
    settings, unit = tmp_path / "etc/weightcached/weightcached.env", tmp_path / UNITS / "weightcached.target"
    settings.write_text("WEIGHTCACHED_MODEL=/mine\n")
    unit.write_text("[Unit]\n")
    capsys.readouterr()
    assert install(tmp_path) == 0
    output = capsys.readouterr().out
    assert settings.read_text() == "WEIGHTCACHED_MODEL=/mine\n"
    assert "Description" in unit.read_text()
    assert f"kept {settings}" in output
    assert f"wrote {unit}" in output
    assert output.count("wrote") == 1
    assert installed(tmp_path) == INSTALLED  # nothing was left aside


def test_what_an_older_systemd_does_not_know_is_installed_for_newer_ones_only(tmp_path: Path) -> None:
    install(tmp_path, version=254)
    assert installed(tmp_path) == {*INSTALLED, PRESERVE}
    assert "FileDescriptorStorePreserve=yes" in (tmp_path / PRESERVE).read_text()
    install(tmp_path, version=253)
    assert installed(tmp_path) == INSTALLED


def test_folders_can_be_entered_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_dir()} == {0o755}


def test_another_executable_may_be_named(tmp_path: Path) -> None:
    assert install(tmp_path, "--executable", "/opt/weightcached/bin/weightcached") == 0
    assert (
        "ExecStart=/opt/weightcached/bin/weightcached serve" in (tmp_path / UNITS / "weightcached@.service").read_text()
    )


@pytest.mark.parametrize(
    "executable", ["relative/weightcached", "/with space/weightcached", "/%n/weightcached", "/a;b"]
)
def test_a_path_that_a_unit_would_not_understand_is_refused(
    executable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(tmp_path, "--executable", executable) == 1
    assert "cannot stand in a unit file" in capsys.readouterr().err
    assert installed(tmp_path) == set()


def test_a_file_in_the_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "usr").write_text("")
    assert install(tmp_path) == 1
    assert f"{tmp_path}/usr" in capsys.readouterr().err


@pytest.mark.parametrize("root", ["relative", "/no/such/folder"])
def test_a_root_that_is_none_is_refused(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", root, "--systemd-version", "252"]) == 64
    assert "--root" in capsys.readouterr().err


def test_folders_that_the_services_user_may_not_enter_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = closed_folders()
    assert all(not folder.stat().st_mode & stat.S_IXOTH for folder in closed)
    assert {
        folder for folder in Path(sys.executable).resolve().parents if not folder.stat().st_mode & stat.S_IXOTH
    } <= set(closed)
    install(tmp_path)
    warned = re.search("warning: .*may not enter", capsys.readouterr().out)
    assert bool(warned) == bool(closed)
