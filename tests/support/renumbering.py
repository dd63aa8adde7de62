"""Having the kernel give a descriptor's number again, to whoever opens the next ones."""

import os

from weightcached.protocol.deadline import Deadline
from weightcached.protocol.fds import OwnedFds


def free_again(number: int) -> OwnedFds:
    """Wait until that descriptor is closed, and leave one below it free: the next two that are opened are these, as
    long as what this gives is open.
    """
    below, deadline = list[int](), Deadline.after(20)
    while (opened := os.open(os.devnull, os.O_RDONLY)) != number:
        assert not deadline.passed
        if opened < number:
            below.append(opened)
        else:
            os.close(opened)
    os.close(opened)
    os.close(below.pop())
    return OwnedFds(below)
