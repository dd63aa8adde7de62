"""A process of another user that listens where a daemon would, and tells how many bytes a client sent to it."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


@contextmanager
def listening_as(uid: int, path: Path, *, from_step: Literal["bind", "listen"] = "bind") -> Iterator[Callable[[], int]]:
    """A forked child (needs root) that is ``uid`` from ``bind`` or from ``listen`` on, and listens at ``path``.

    The socket file belongs to who binds, the peer's credentials to who listens. Gives a function that waits until the
    first client has gone and returns how many bytes it sent. The file is removed at the end.
    """
    ready_r, ready_w = os.pipe()
    count_r, count_w = os.pipe()
    end_r, end_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_w)
            _listen(uid, path, from_step, ready_w, count_w, end_r)
        finally:
            os._exit(0)
    for fd in (ready_w, count_w, end_r):
        os.close(fd)
    try:
        assert os.read(ready_r, 1) == b"r", "the listener did not come up"
        yield lambda: int.from_bytes(os.read(count_r, 8), "little")
    finally:
        for fd in (ready_r, count_r, end_w):
            os.close(fd)
        os.waitpid(pid, 0)
        path.unlink(missing_ok=True)


def _listen(uid: int, path: Path, from_step: str, ready_w: int, count_w: int, end_r: int) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if from_step == "bind":
        _become(uid)
    listener.bind(str(path))
    os.chmod(path, 0o666)
    if from_step == "listen":
        _become(uid)
    listener.listen()
    os.write(ready_w, b"r")
    connection, _ = listener.accept()
    total = 0
    while data := connection.recv(65536):
        total += len(data)
    os.write(count_w, total.to_bytes(8, "little"))
    os.read(end_r, 1)


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
