"""Becomes another program with descriptors at 3, 4, …, as a service manager starts one.

`hand_over.py FDS NAMES PROGRAM…`: FDS are this process's, joined by commas; NAMES go into LISTEN_FDNAMES. With no FDS
nothing is handed over.
"""

import fcntl
import os
import sys


def main() -> None:
    numbers, names, *command = sys.argv[1:]
    fds = [int(number) for number in numbers.split(",") if number]
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds)) for fd in fds]
    os.closerange(3, 3 + len(fds))
    for position, fd in enumerate(aside):
        os.dup2(fd, 3 + position)
    os.closerange(3 + len(fds), max([3 + len(fds), *fds]) + 1)
    if fds:
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": names}
    os.execv(command[0], command)  # noqa: S606


main()
