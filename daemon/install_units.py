"""``weightcached install-units``: the systemd files, put where systemd looks, with the path of this installation.

Owns where each file goes, and which of them the systemd at hand understands. The files themselves are in ``systemd/``;
so is what an operator does next. Nothing is enabled, started or reloaded here: the next steps are printed.

Exit codes: 0 installed · 1 could not be written, or the executable or systemd was not found · 64 bad options.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from weightcached.daemon.text import one_line
from weightcached.protocol.command_line import USAGE_EXIT, Parser, whole_number
from weightcached.protocol.errors import DeploymentError, InvalidOption, WeightCacheError

SHIPPED_EXECUTABLE = "/usr/bin/weightcached"
"""What the shipped files say; replaced by the real path."""
PRESERVE_SINCE = 254
"""The first systemd with ``FileDescriptorStorePreserve=``."""

_UNITS = "usr/local/lib/systemd/system"  # for units that an administrator installs; /etc stays for changes to them
_PRESERVE = f"{_UNITS}/weightcached@.service.d/50-preserve.conf"
_SETTINGS = "etc/weightcached/weightcached.env"
_MODE = 0o644
_DIRECTORY_MODE = 0o755
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+-]+")

_NEXT_STEPS = """\
next:
  systemd-sysusers && systemd-tmpfiles --create weightcached.conf && systemctl daemon-reload
  set WEIGHTCACHED_MODEL in /etc/weightcached/weightcached.env
  systemctl enable --now weightcached@0.service weightcached.target"""


@dataclass(frozen=True)
class Item:
    """One file to install, relative to the root."""

    path: str
    content: bytes
    keep: bool = False
    """Whether one that is there already stays as it is: somebody's settings."""


def items(executable: Path, *, systemd_version: int) -> Iterator[Item]:
    """Every file, with its content."""
    for name in (
        "weightcached@.service",
        "weightcached.target",
        "weightcached-exporter.service",
        "weightcached-engine-example.service",
    ):
        yield Item(f"{_UNITS}/{name}", _shipped(name).replace(SHIPPED_EXECUTABLE.encode(), os.fsencode(executable)))
    if systemd_version >= PRESERVE_SINCE:
        yield Item(_PRESERVE, _shipped("50-preserve.conf"))
    yield Item("usr/local/lib/sysusers.d/weightcached.conf", _shipped("sysusers.conf"))
    yield Item("usr/local/lib/tmpfiles.d/weightcached.conf", _shipped("tmpfiles.conf"))
    yield Item(_SETTINGS, _shipped("weightcached.env"), keep=True)


def _shipped(name: str) -> bytes:
    return files("weightcached.systemd").joinpath(name).read_bytes()


def install(root: Path, executable: Path, *, systemd_version: int) -> Iterator[str]:
    """Write the files under ``root``; yields a line about each. Raises DeploymentError for what cannot be written."""
    for item in items(executable, systemd_version=systemd_version):
        path = root / item.path
        try:
            yield f"{_put(path, item)} {path}"
        except OSError as error:
            raise DeploymentError("a file cannot be installed", found=error.strerror, where=path) from error
    if systemd_version < PRESERVE_SINCE:
        (root / _PRESERVE).unlink(missing_ok=True)  # left by a newer systemd that was there before


def _put(path: Path, item: Item) -> str:
    """Put one file in place, whole or not at all; what became of it, in a word."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = None
    if found == item.content or (found is not None and item.keep):
        return "kept"
    for missing in reversed([folder for folder in path.parents if not folder.exists()]):
        missing.mkdir()
        missing.chmod(_DIRECTORY_MODE)  # whatever the umask is
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(item.content)
            os.fchmod(file.fileno(), _MODE)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return "wrote"


def installed_executable() -> Path:
    """The ``weightcached`` command of the Python environment that runs this."""
    return Path(sysconfig.get_path("scripts")) / "weightcached"


def require_startable(executable: Path, *, root: Path) -> None:
    """Raises DeploymentError for a path that a unit could not start. Under another root, nobody can look."""
    if not _PLAIN_PATH.fullmatch(str(executable)):
        raise DeploymentError(
            "this path cannot stand in a unit file as it is",
            expected="an absolute path of letters, digits and _ . / + -",
            found=str(executable),
            next_step="install weightcached where the path is plain, or name a plain link to it with --executable",
        )
    if root == Path("/") and not os.access(executable, os.X_OK):
        raise DeploymentError(
            "units would start a command that is not there",
            expected="the weightcached command of this installation",
            where=executable,
            next_step="name it with --executable",
        )


def closed_folders() -> list[Path]:
    """Folders of this installation that other users may not enter: the services' user could not start it."""
    ours = (installed_executable(), Path(sys.executable), Path(__file__))
    above = {folder for path in ours for one in (path.absolute(), path.resolve()) for folder in one.parents}
    return sorted(folder for folder in above if not folder.stat().st_mode & 0o001)


def running_systemd_version() -> int:
    """The version of this machine's systemd. Raises DeploymentError."""
    command = shutil.which("systemctl")
    output = ""
    if command is not None:
        output = subprocess.run([command, "--version"], check=False, capture_output=True, text=True).stdout
    found = re.match(r"systemd (\d+)", output)
    if found is None:
        raise DeploymentError(
            "which systemd the files are for is unknown",
            expected="systemctl --version, which says so",
            found="no systemctl" if command is None else repr(output[:60]),
            next_step="name it: --systemd-version 252",
        )
    return int(found[1])


def main(argv: list[str]) -> int:
    """Install, print each path and the next steps, and return the exit code."""
    parser = Parser(
        prog="weightcached install-units",
        description="Put the systemd files where systemd looks: units, the user, the runtime directory, and a sample\n"
        "of the settings (which is never overwritten). They start this installation's weightcached.",
        epilog="exit codes: 0 installed; 1 could not be written, or weightcached or systemd was not found;\n"
        "64 bad options",
    )
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="an image's root (default: /)")
    parser.add_argument("--executable", type=Path, metavar="PATH", help="what units start (default: this weightcached)")
    parser.add_argument(
        "--systemd-version",
        type=whole_number(1),
        metavar="N",
        help="the systemd to install for (default: this machine's)",
    )
    given = parser.parse_args(argv)
    executable = given.executable or installed_executable()
    try:
        _require_root(given.root)
        require_startable(executable, root=given.root)
        version = given.systemd_version or running_systemd_version()
        for line in install(given.root, executable, systemd_version=version):
            print(one_line(line))
    except WeightCacheError as error:
        print(one_line(f"weightcached install-units: {error}"), file=sys.stderr)
        return USAGE_EXIT if isinstance(error, InvalidOption) else 1
    if given.executable is None and (closed := closed_folders()):
        names = ", ".join(map(str, closed))
        print(one_line(f"warning: the user `weightcached` may not enter {names}, and {executable} needs it"))
    print(_NEXT_STEPS)
    return 0


def _require_root(root: Path) -> None:
    if not root.is_absolute() or not root.is_dir():
        raise InvalidOption("--root is not a directory", expected="an absolute path of one", found=str(root))
