"""What a container engine would make of the image and the compose file, made by hand: the daemon's entry point as
PID 1, and an engine, each in namespaces of its own (processes, mounts, network, host name, IPC), as the image's user,
on a root that cannot be written. They share the runtime directory and the models, and nothing else.

No image is built here; the interpreter and the packages are those of this checkout.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support.checkpoints import tiny_llama
from tests.support.daemons import TIMEOUT_S, Log
from tests.support.deployed import DEPLOY
from tests.support.unprivileged import command_as, folder_for_everyone

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SERVICES = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
USER = 10001
ATTACH = """
import sys
from weightcached.client import attach
with attach(sys.argv[1], mode="require", timeout_s=60) as weights:
    print(weights.source, len(weights), weights.resident_bytes, flush=True)
"""
SCRAPE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9411/readyz').status)"
LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))  # SIOCSIFFLAGS, IFF_UP
"""

pytestmark = pytest.mark.root


def words_of(instruction: str) -> list[str]:
    """The JSON list after the last ``instruction`` of the Dockerfile."""
    found: list[str] = json.loads(re.findall(rf"{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    return found


def our_own(words: Sequence[str]) -> list[str]:
    """``weightcached …`` by this interpreter."""
    assert words[0] == "weightcached"
    return [sys.executable, "-P", "-m", "weightcached.daemon", *words[1:]]


def contained(folder: Path, argv: Sequence[str | Path]) -> list[str]:
    """The command that runs ``argv`` in a container: ``folder`` has what is mounted there."""
    script = f"""
        set -e
        {shlex.join([sys.executable, "-P", "-c", LOOPBACK_UP])}
        mount -t tmpfs none /mnt
        mkdir -m 1777 /mnt/tmp /mnt/cache
        mkdir /mnt/models
        mount --bind {folder}/models /mnt/models
        mount -t tmpfs none /run
        mkdir /run/weightcached
        mount --bind {folder}/runtime /run/weightcached
        mount -t proc proc /proc
        mount -o remount,bind,ro /
        export TMPDIR=/mnt/tmp XDG_CACHE_HOME=/mnt/cache
        cd /
        exec {shlex.join(map(str, command_as(USER, argv)))}
    """
    namespaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork")
    return ["unshare", *namespaces, "--propagation=private", "sh", "-c", script]


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_for_everyone() as made:
        tiny_llama(made / "models" / "tiny")
        for path in made.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        runtime = made / "runtime"  # as the image has it
        runtime.mkdir(0o755)
        os.chown(runtime, USER, USER)
        yield made


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[int, Log]]:
    """The daemon of the compose file: the process id of its PID 1, and its log."""
    options = [
        word.replace("/models/${MODEL:?the name of a directory in MODELS}", "/mnt/models/tiny")
        for word in SERVICES["weights"]["command"]
    ]
    command = contained(folder, our_own([*words_of("ENTRYPOINT"), *options, "--log-format", "json"]))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = Log(process.stderr)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        log.wait_for(lambda line: '"published"' in line)
        yield int(children.read_text()), log
    finally:
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # its PID 1: the kernel ends everything in there with it
        process.wait(TIMEOUT_S)
        log.join()


def inside(pid: int, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run in the container of ``pid``, as its user."""
    entering = ["nsenter", "--target", str(pid), "--mount", "--pid", "--net", "--ipc", "--uts"]
    identity = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    command = [*entering, *identity, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_the_image_runs_as_the_user_whom_the_manifests_name() -> None:
    assert re.search(rf"^USER {USER}:{USER}$", DOCKERFILE, re.MULTILINE)
    manifest = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "engine.yaml").read_text()))
    assert manifest["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == USER


def test_a_daemon_and_engines_in_containers(folder: Path) -> None:
    attach = contained(folder, [sys.executable, "-P", "-c", ATTACH, "/mnt/models/tiny"])
    with daemon(folder) as (pid, log):
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE), "the supervisor is PID 1"
        assert re.search(rf"^Uid:\t{USER}\t", status, re.MULTILINE)
        healthy = inside(pid, our_own(words_of("HEALTHCHECK.*CMD")))
        assert healthy.returncode == 0, healthy.stderr

        first = subprocess.run(attach, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert first.stdout.startswith("daemon "), first.stderr

        keeper = json.loads(inside(pid, our_own(["weightcached", "status", "--json"])).stdout)["daemons"][0]["pid"]
        assert inside(pid, ["kill", "-KILL", str(keeper)]).returncode == 0
        log.wait_for(lambda line: '"published"' in line and '"adopt"' in line)
        again = subprocess.run(attach, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert again.stdout == first.stdout, again.stderr

        scraped = inside(pid, [sys.executable, "-P", "-c", SCRAPE])
        assert scraped.stdout == "200\n", scraped.stderr
