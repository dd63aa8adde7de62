"""Are resident bytes those that their manifest describes? Has them hashed by another process, at memory speed.

Owns that process and what its answer means. Asked before weights are served again after a restart, where the options
say so, and before a change counts as prepared, always.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightcached.daemon.children import Child, parent_arguments
from weightcached.protocol.errors import TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import MemoryKind

MODULE = "weightcached.loader.verify"

log = logging.getLogger(__name__)


async def verify(kind: MemoryKind, manifest: int, segments: Sequence[int], *, yields: bool = False) -> None:
    """Have every byte that a row describes hashed, with ``yields`` behind everybody else's work. The descriptors stay
    the caller's. Cancelled, the process is killed.

    Raises TransferError when one is not what was published, ContractError for a process that does not answer.
    """
    with OwnedFds() as fds:
        fds.append(host.export(manifest))
        for segment in segments:
            fds.append(kind.export(segment))
        passed = [fds[position] for position in range(len(fds))]
        arguments = ["--manifest", str(passed[0]), *(f"--segment={fd}" for fd in passed[1:]), *parent_arguments()]
        if yields:
            arguments.append("--yield")
        child = await Child.start("verify", MODULE, arguments, pass_fds=passed, answers=True)
        try:
            answer = await child.answer()
        finally:
            await child.end()
    if answer.get("differing_count") != 0:
        raise TransferError(
            "resident bytes are not those that were published",
            expected=f"{answer.get('rows')} parameters as the manifest describes them",
            found=f"{answer.get('differing_count')} that differ: {', '.join(map(str, answer.get('differing') or ()))}",
        )
    log.info("verified", extra={key: answer.get(key) for key in ("rows", "nbytes", "seconds")})
