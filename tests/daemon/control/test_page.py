"""The page on the control plane says what the code does: its tables are compared, and its program is run."""

import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from tests.support.daemons import TIMEOUT_S, scripted_daemon
from tests.support.unprivileged import ROOT
from weightcached.daemon.control import command_socket, door, event_socket
from weightcached.protocol import control
from weightcached.protocol.messages import Dialect

TEXT = (ROOT / "daemon/control/README.md").read_text()


def told(name: str) -> list[list[str]]:
    """What a table says, without its last column, which explains."""
    found = re.search(rf"^<!-- table: {name} -->\n(?P<rows>(?:\|.*\n)+)", TEXT, re.M)
    assert found, name
    rows = found["rows"].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")][:-1] for row in rows]


@pytest.mark.parametrize(
    "dialect",
    [control.CONTROL_REQUESTS, control.CONTROL_ANSWERS, control.CONTROL_EVENTS],
    ids=lambda dialect: dialect.name,
)
def test_messages_have_their_numbers(dialect: Dialect) -> None:
    assert told(dialect.name) == [[str(number), kind.__name__] for number, kind in dialect.types.items()]


def test_every_kind_of_event_is_there() -> None:
    assert [kind for (kind,) in told("events")] == list(typing.get_args(control.EventKind))


def test_limits_are_those_of_the_code() -> None:
    assert dict(told("limits")) == {
        "body of a command": str(control.CONTROL_REQUESTS.body_max_bytes),
        "body of an answer or event": str(control.CONTROL_ANSWERS.body_max_bytes),
        "subscription": str(control.SUBSCRIPTION_MAX_BYTES),
        "subscriptions of one listener": str(control.SUBSCRIPTIONS_MAX),
        "connections at one socket": str(door.CONNECTIONS_MAX),
        "commands under way": str(command_socket.UNDER_WAY_MAX),
        "commands under way of one connection": str(command_socket.UNDER_WAY_EACH_MAX),
        "commands that merely wait (`AwaitChange`)": str(command_socket.WAITING_MAX),
        "silence before the greeting": f"{door.HANDSHAKE_MAX_S:g}",
        "events that wait for one listener": str(event_socket.QUEUED_MAX),
    }
    assert control.CONTROL_EVENTS.body_max_bytes == control.CONTROL_ANSWERS.body_max_bytes


def test_no_dialect_carries_descriptors() -> None:
    dialects = (control.CONTROL_REQUESTS, control.CONTROL_ANSWERS, control.CONTROL_EVENTS)
    assert [one.fds_max for one in dialects] == [0, 0, 0]


def test_the_program_on_the_page_is_answered(model: Path, runtime_dir: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    with scripted_daemon(model, runtime_dir) as daemon:
        daemon.wait_until("ready")
        daemon.wait_logged("control plane")
        command = [sys.executable, "-c", program, str(daemon.place.control_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert result.stdout == "b'question' 163 ready\n"
