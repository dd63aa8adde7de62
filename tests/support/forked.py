"""Running a function in a forked child, as another user if need be, and raising here what it raises there."""

import faulthandler
import os
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object], *, uid: int | None = None) -> None:
    """Fork; become user and group ``uid`` (needs root); call ``work``. AssertionError with its traceback if it raises.

    The child leaves with ``os._exit``: nothing of the test framework runs in it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = b""
        faulthandler.disable()  # a child that is meant to crash need not tell the terminal
        try:
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            work()
        except BaseException:  # noqa: BLE001  # whatever it was is raised again in the parent
            report = traceback.format_exc().encode() or b"raised"
        finally:
            os.write(writing, report[-60_000:])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    assert not report, report.decode()
