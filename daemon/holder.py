"""The worker that stays: the process whose memory a generation is, for kinds whose memory dies with its process.

Owns knowing of its end. What keeps it alive is a descriptor among the generation's own (its *cord*, our end of the
socket to it): closing the generation's memory lets it go, however that comes about, and when we die the kernel does
both, close the cord and kill it. What tells engines of its end is another, which each is given a copy of: the kernel's
own for a process (a pidfd), readable when it has ended, in whatever PID namespace, and good for nothing else to
whoever may not signal it anyway.
"""

from __future__ import annotations

import asyncio
import os

from weightcached.daemon.children import Child, describe_exit
from weightcached.protocol.errors import HolderDied, InvalidEnvironment

_LETS_GO_TIMEOUT_S = 10.0
"""For giving gigabytes of a device back; a process that takes longer is killed."""


class Holder:
    """``child`` has reported that all is filled, and holds it."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.process.pid

    def watched(self) -> int:
        """A descriptor that is readable when it has ended. The caller owns it; for the event loop's thread, which is
        the only one that reaps it. Raises HolderDied, and InvalidEnvironment where the kernel has none to give.
        """
        if (code := self._child.process.returncode) is not None:
            raise self._death(code)
        try:
            return os.pidfd_open(self.pid)
        except OSError as error:
            raise InvalidEnvironment(
                "nobody could be told of the end of the process that holds the weights",
                expected="pidfd_open (Linux 5.3, and a container runtime that allows it)",
                found=error.strerror,
                next_step="choose another memory kind (--memory), or allow the call",
            ) from error

    async def died(self) -> HolderDied:
        """Wait for its end; what is to be said where nobody has let it go."""
        return self._death(await self._child.ended())

    async def gone(self) -> None:
        """It was let go: wait until its memory is the device's again."""
        try:
            async with asyncio.timeout(_LETS_GO_TIMEOUT_S):
                await self._child.ended()
        except TimeoutError:
            await self._child.end()

    def _death(self, code: int) -> HolderDied:
        return HolderDied(
            "the process that held the weights has ended, and they are gone with it",
            expected="memory of kind cuda-ipc, which lives as long as that process",
            found=f"pid {self.pid}: {describe_exit(code)}; last words: {self._child.last_words}",
            next_step="start the daemon again: it loads anew",
        )
