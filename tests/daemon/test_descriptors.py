"""A keeper that may open few files only: its clients cannot take what it needs to load, and too few is said at once."""

import os
from contextlib import ExitStack
from pathlib import Path

from tests.support.daemons import SCRIPTED, TIMEOUT_S, connect, scripted_environment, start
from weightcached.protocol.channel import Channel

LIMIT = 100


def limited(limit: int) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *SCRIPTED)


def test_clients_that_wait_for_a_load_leave_it_the_descriptors_it_needs(model: Path, runtime_dir: Path) -> None:
    """More of them than there are descriptors, from before the segments are allocated."""
    release = runtime_dir.parent / "release"
    os.mkfifo(release)
    held = os.open(release, os.O_RDWR)
    script = {"hang_at": "start", "release": str(release)}
    daemon = start(model, runtime_dir, command=limited(LIMIT), environment=scripted_environment(runtime_dir, script))
    with ExitStack() as ended:
        ended.callback(daemon.stop)
        ended.callback(os.close, held)
        daemon.wait_logged("state", state="loading")
        for _ in range(LIMIT):
            channel: Channel = connect(daemon.place)
            ended.callback(channel.close)
        os.write(held, b"!")
        daemon.wait_logged("state", state="ready")


def test_too_few_for_any_client_is_no_bug(model: Path, runtime_dir: Path) -> None:
    daemon = start(model, runtime_dir, command=limited(40), environment=scripted_environment(runtime_dir, None))
    assert daemon.process.wait(TIMEOUT_S) == 1
    daemon.log.join()
    assert [line for line in daemon.log.lines if '"code": "invalid_environment"' in line]
