"""The helper for other users: this interpreter, its packages and this tree can be used, and nothing of root's can."""

import json
import subprocess
import sys

import pytest

from tests.support.unprivileged import NOBODY, command_as, folder_for_everyone

PROGRAM = """
import json, os, subprocess, sys
import pydantic, weightcached.protocol.errors
def refused(path):
    try:
        open(path).close()
    except PermissionError:
        return True
    return False
again = subprocess.run([sys.executable, "-c", "import weightcached.client"]).returncode
caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff", "CapInh"))]
print(json.dumps({"ids": os.getresuid() + os.getresgid(), "groups": os.getgroups(), "caps": caps, "pid": os.getpid(),
    "again": again, "prefix": sys.prefix, "base": sys.base_prefix, "refused": refused(sys.argv[1])}))
"""


@pytest.mark.root
def test_a_user_without_rights_runs_this_interpreter_and_no_more() -> None:
    with folder_for_everyone() as folder:
        secret = folder / "secret"
        secret.touch(mode=0o600)
        command = command_as(NOBODY, [sys.executable, "-c", PROGRAM, secret])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(output) == {
        "ids": [NOBODY] * 6,
        "groups": [],
        "caps": ["0000000000000000"] * 3,
        "pid": process.pid,
        "again": 0,
        "prefix": sys.prefix,
        "base": sys.base_prefix,
        "refused": True,
    }
