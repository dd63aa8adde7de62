"""What a helper process does to itself at its start, seen from outside."""

import os
import select
import signal
import subprocess
import sys

DEADLINE_S = 20

CHILD = """
import os, sys
from weightcached.protocol.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()  # for ever: nobody writes
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""


def test_a_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert select.select([child], [], [], 0)[0] == [], "the child lives while its parent does"
            parent.kill()
            assert select.select([child], [], [], DEADLINE_S)[0] == [child]
        finally:
            os.close(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, "999999999"], stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S
    )
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, b"")


def test_a_process_steps_back_behind_all_others() -> None:
    program = """
import os
from weightcached.protocol.processes import lower_priority
print(lower_priority(), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
os.execvp("ionice", ["ionice", "-p", str(os.getpid())])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["() 19", "idle"]
