"""The units as files: systemd finds nothing to complain about, and the service has few rights."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weightcached.daemon.install_units import main, running_systemd_version

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")

UNITS = (
    "weightcached@0.service",
    "weightcached.target",
    "weightcached-exporter.service",
    "weightcached-engine-example.service",
)
EXPOSURE_MAX = 4.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The units, installed for the systemd that is here."""
    assert main(["--root", str(tmp_path)]) == 0
    return tmp_path / "usr/local/lib/systemd/system"


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *map(str, words)], capture_output=True, text=True)


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    return analyze("verify", "--man=no", *(folder / unit for unit in UNITS))


def test_systemd_has_nothing_to_complain_about(folder: Path) -> None:
    done = verify(folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_only_for_newer_systemds_would_be_complained_about(folder: Path) -> None:
    """The gate is standard error: systemd exits with 0 for keys that it does not know."""
    main(["--root", str(folder.parents[4]), "--systemd-version", "254"])
    done = verify(folder)
    assert done.returncode == 0
    assert ("FileDescriptorStorePreserve" in done.stderr) == (running_systemd_version() < 254)


def test_a_typing_error_would_be_noticed(folder: Path) -> None:
    unit = folder / "weightcached@.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verify(folder).stderr


@pytest.mark.parametrize("unit", ["weightcached@.service", "weightcached-exporter.service"])
def test_the_services_have_few_rights(unit: str, folder: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", folder / unit)
    assert done.returncode == 0, done.stdout
    exposure = float(re.findall(r"exposure level .*: ([0-9.]+)", done.stdout)[0])
    print(f"exposure {exposure}, at most {EXPOSURE_MAX}")
    assert exposure <= EXPOSURE_MAX
