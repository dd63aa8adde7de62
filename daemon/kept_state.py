"""The state record at its two edges: which of the memfds that a vault handed back counts, and what of a generation is
written down.

Used by ``custody.py``, which owns the record, and changes it.
"""

from __future__ import annotations

import logging

from weightcached.daemon.generation import Generation
from weightcached.daemon.holdings import STATE_NAME, Holdings
from weightcached.daemon.state_record import GenerationRecord, ReceiptsRecord, StateFile
from weightcached.daemon.vault import Vault
from weightcached.protocol.errors import TransferError

log = logging.getLogger(__name__)


async def opened_state(vault: Vault, holdings: Holdings) -> StateFile:
    """The state that came back; repaired where nothing in it is valid; a new one where none came."""
    opened = []
    for name, fd in holdings.states:
        try:
            opened.append(StateFile.open(fd))
        except TransferError as error:
            log.error("the state in the vault cannot be used", extra={"name_in_vault": name, "reason": str(error)})
        else:
            holdings.take(fd)
    best = max(opened, key=lambda one: one.sequence, default=None)
    for other in opened:
        if other is not best:
            other.close()
    if best is not None and best.damage is not None:
        log.error("the state in the vault is damaged: going on without it", extra={"reason": best.damage})
    if best is not None and len(holdings.states) == 1:
        return best
    if holdings.states:
        await vault.forget({name for name, _ in holdings.states})
    chosen = best or StateFile.create()
    await vault.store([(STATE_NAME, chosen.fd)])
    return chosen


def record_of(generation: Generation, known: GenerationRecord | None = None) -> GenerationRecord:
    """What the next keeper has to know about it. ``known``: what was recorded before."""
    receipts = generation.receipts
    return GenerationRecord(
        id=generation.id,
        manifest_sha256=generation.manifest_sha256,
        manifest_nbytes=generation.manifest_nbytes,
        segments_nbytes=generation.segments_nbytes,
        resident_nbytes=generation.resident_nbytes,
        bytes_read=generation.bytes_read,
        accounting=generation.accounting,
        receipts=ReceiptsRecord(sha256=receipts.sha256, trusted=receipts.trusted, rule=receipts.rule),
        digest=generation.digest,
        provenance=generation.provenance,
        seconds=generation.seconds,
        model_dir=generation.origin.model_dir,
        hub_id=generation.origin.hub_id,
        engine_inputs=generation.engine_inputs,
        proven_receipts=known.proven_receipts if known is not None else (),
        under_model=generation.under_model,
        pushed_by=generation.pushed_by,
        staged=known.staged if known is not None else False,
    )
