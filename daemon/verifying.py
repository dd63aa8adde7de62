"""Are resident bytes those that their manifest describes? Has them hashed by another process, at memory speed.

Owns that process and what its answer means. Asked before weights are served again after a restart, where the options
say so, and before a change counts as prepared, always: then also whether engines can bind them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightcached.daemon.children import Child, parent_arguments
from weightcached.protocol.errors import ConfigurationError, TransferError
from weightcached.protocol.fds import OwnedFds
from weightcached.protocol.memory import host
from weightcached.protocol.memory.kinds import MemoryKind

MODULE = "weightcached.loader.verify"

_FORMS_SHOWN = 8

log = logging.getLogger(__name__)


async def verify(
    kind: MemoryKind, manifest: int, segments: Sequence[int], *, yields: bool = False, beside: int | None = None
) -> bool:
    """Have every byte that a row describes hashed, with ``yields`` behind everybody else's work, and every row's form
    compared with that in the manifest ``beside``, of what is served: whether all are the very bytes of that. The
    descriptors stay the caller's. Cancelled, the process is killed.

    Raises TransferError when one is not what was published, ConfigurationError for parameters of another form,
    ContractError for a process that does not answer, WorkerDied for one that was killed.
    """
    with OwnedFds() as fds:
        fds.append(host.export(manifest))
        for segment in segments:
            fds.append(kind.export(segment))
        passed = [fds[position] for position in range(len(fds))]
        arguments = ["--manifest", str(passed[0]), *(f"--segment={fd}" for fd in passed[1:]), *parent_arguments()]
        if beside is not None:
            fds.append(host.export(beside))
            passed.append(fds[len(passed)])
            arguments += ["--beside", str(passed[-1])]
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
    if others := answer.get("formed_otherwise_count"):
        shown = list(map(str, answer.get("formed_otherwise") or ()))[:_FORMS_SHOWN]
        more = [f"and {others - len(shown)} more"] if others > len(shown) else []
        raise ConfigurationError(
            "the weights that are served cannot be changed for these: engines that are made for them could not bind "
            f"{others} parameters",
            expected="the names, shapes and dtypes of what is served",
            found="; ".join([*shown, *more]),
            next_step="serve these under another --name, or restart the daemons with them",
        )
    log.info("verified", extra={key: answer.get(key) for key in ("rows", "nbytes", "seconds")})
    return answer.get("same") is True
