"""What a service manager hands over, as a process of its own sees it: descriptors from 3 up, and three variables."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from weightcached.daemon.listen_fds import take_handed_over
from weightcached.protocol.errors import InvalidEnvironment

PROGRAM = """
import json, os, sys
from weightcached.daemon.listen_fds import take_handed_over
from weightcached.protocol.errors import WeightCacheError
try:
    handed = take_handed_over()
except WeightCacheError as error:
    print(json.dumps(error.as_fields()))
    sys.exit(1)
print(json.dumps({
    "names": handed.names,
    "fds": [handed.fds[position] for position in range(len(handed.fds))],
    "texts": [os.pread(handed.fds[position], 100, 0).decode() for position in range(len(handed.fds))],
    "inheritable": [os.get_inheritable(handed.fds[position]) for position in range(len(handed.fds))],
    "left": sorted(name for name in os.environ if name.startswith("LISTEN_")),
}))
"""

SHIM = """
import fcntl, os, sys
program, *numbers = sys.argv[1:]
aside = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 3 + len(numbers)) for number in numbers]
for position, fd in enumerate(aside):
    os.dup2(fd, 3 + position)
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-P", "-c", program])
"""
"""Becomes the process that is handed something: only who has the pid can say which it is."""


def hand_over(texts: Sequence[str], **variables: str) -> dict[str, Any]:
    """Start a process with files that hold ``texts`` at 3, 4, …, and these variables. What it found, or its error."""
    fds = []
    for text in texts:
        fds.append(os.memfd_create("handed"))
        os.write(fds[-1], text.encode())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LISTEN_")}
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", SHIM, PROGRAM, *map(str, fds)],
            env={**environment, **variables},
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        for fd in fds:
            os.close(fd)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_names_and_descriptors_in_order_and_nothing_for_children() -> None:
    found = hand_over(["one", "two", "three"], LISTEN_FDS="3", LISTEN_FDNAMES="state:g0.s0:state")
    assert found == {
        "names": ["state", "g0.s0", "state"],
        "fds": [3, 4, 5],
        "texts": ["one", "two", "three"],
        "inheritable": [False] * 3,
        "left": [],
    }


def test_without_names() -> None:
    assert hand_over(["one", "two"], LISTEN_FDS="2")["names"] == ["unknown", "unknown"]


def test_none_at_all() -> None:
    assert hand_over([], LISTEN_FDS="0", LISTEN_FDNAMES="")["names"] == []
    handed = take_handed_over({})
    assert (handed.names, len(handed.fds)) == ((), 0)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, "not meant for this process"),
        ({"LISTEN_PID": "", "LISTEN_FDS": "1"}, "not meant for this process"),
        ({}, "LISTEN_FDS is not a count"),
        ({"LISTEN_FDS": "-1"}, "LISTEN_FDS is not a count"),
        ({"LISTEN_FDS": "²"}, "LISTEN_FDS is not a count"),
        ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "a:b"}, "does not name each"),
        ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": ""}, "does not name each"),
        ({"LISTEN_FDS": "500"}, "was not handed over"),
    ],
)
def test_what_cannot_be_true_is_refused(variables: dict[str, str], message: str) -> None:
    found = hand_over(["one"], **variables)
    assert found["code"] == "invalid_environment"
    assert message in found["message"]


def test_variables_of_another_process_are_explained() -> None:
    found = hand_over(["one"], LISTEN_PID="1", LISTEN_FDS="1")
    assert found["found"] == "LISTEN_PID=1"
    assert "sh -c" in found["next_step"]
    assert "timeout" in found["next_step"]


def test_a_shell_in_between_is_refused() -> None:
    """The usual cause, for real: the shell has the pid, and weightcached is its child."""
    program = "from weightcached.daemon.listen_fds import take_handed_over as take\ntake()"
    script = 'export LISTEN_PID=$$ LISTEN_FDS=0; "$0" -P -c "$1"; exit $?'
    answer = subprocess.run(["sh", "-c", script, sys.executable, program], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "not meant for this process" in answer.stderr
    through_exec = subprocess.run(["sh", "-c", script.replace('"$0"', 'exec "$0"'), sys.executable, program])
    assert through_exec.returncode == 0


def test_a_descriptor_of_our_own_is_not_taken_for_one_that_was_handed_over() -> None:
    own = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(own - 2)}
        with pytest.raises(InvalidEnvironment, match="was not handed over"):
            take_handed_over(variables)
    finally:
        os.close(own)
