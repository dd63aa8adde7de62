"""The vault: what holds descriptors when the keeper dies. Under systemd its fd store, in a container our supervisor.

Owns storing with a proof that all was kept, and removing. What is stored, when, and under which names is
``custody.py``'s business. A service manager keeps as many descriptors as it may and drops the rest without a word, so
after a barrier it is asked: our supervisor lists what it keeps; systemd counts (``systemctl show``, where the unit says
its name in ``WEIGHTCACHED_UNIT``), or has said how many it keeps at most (``FDSTORE``, from 254 on).
"""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from weightcached.daemon.notify import Notifier
from weightcached.protocol.errors import ManagerUnreachable
from weightcached.protocol.messages import VaultState

STORE_MAX_VARIABLE = "FDSTORE"
UNIT_VARIABLE = "WEIGHTCACHED_UNIT"
_SYSTEMCTL_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """How far descriptors outlive the keeper; ``reason`` says why they are not ``kept``."""

    state: VaultState
    reason: str | None = None
    unreachable: bool = False
    """Nobody could be asked: ``dropped`` is the worst case then, and no answer. Fewer descriptors would not help."""


class Vault(Protocol):
    """Descriptors that are passed stay the caller's. Nothing here raises because of the manager."""

    keeps: bool
    """Whether there is anybody to keep anything."""
    outlives_stop: bool
    """Whether what is kept is still there after this process has stopped with exit status 0."""

    async def keep(self, items: Sequence[tuple[str, int]]) -> Keeping:
        """Store, in order, and find out whether all is kept."""

    async def store(self, items: Sequence[tuple[str, int]]) -> None:
        """Store without asking; a later :meth:`keep` also finds out about these."""

    async def forget(self, names: Iterable[str]) -> None:
        """Remove every descriptor of these names; they are closed there when this returns."""


class NoVault:
    """No service manager, or one without a store: nothing outlives this process."""

    keeps = False
    outlives_stop = False

    async def keep(self, items: Sequence[tuple[str, int]]) -> Keeping:
        return Keeping(
            "none",
            "no service manager keeps anything for this daemon: run it under systemd, or under "
            "`weightcached supervise`",
        )

    async def store(self, items: Sequence[tuple[str, int]]) -> None:
        pass

    async def forget(self, names: Iterable[str]) -> None:
        pass


class NotifyVault:
    """Through ``notifier``, which stays the caller's. ``handed`` names what is in the store already."""

    keeps = True

    def __init__(self, notifier: Notifier, *, handed: Iterable[str], store_max: int | None, unit: str | None) -> None:
        self._notifier = notifier
        self._held = Counter(handed)
        self._store_max = store_max
        self._unit = unit
        self._busy = asyncio.Lock()
        """What is counted must hold still: one thing at a time."""
        self.outlives_stop = not notifier.supervised

    @classmethod
    def from_environment(
        cls, notifier: Notifier, *, handed: Iterable[str], environment: MutableMapping[str, str] = os.environ
    ) -> NotifyVault:
        """With what the service manager says about its store. Takes that out of the environment."""
        text = environment.pop(STORE_MAX_VARIABLE, "")
        store_max = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
        return cls(notifier, handed=handed, store_max=store_max, unit=environment.get(UNIT_VARIABLE))

    async def keep(self, items: Sequence[tuple[str, int]]) -> Keeping:
        try:
            async with self._busy:
                await self._store(items)
                await self._notifier.barrier()
                keeping = await self._proof()
        except ManagerUnreachable as error:
            keeping = Keeping("dropped", str(error), unreachable=True)
        if keeping.state != "kept":
            log.warning("the vault", extra={"state": keeping.state, "reason": keeping.reason})
        return keeping

    async def store(self, items: Sequence[tuple[str, int]]) -> None:
        try:
            async with self._busy:
                await self._store(items)
        except ManagerUnreachable as error:
            log.warning("a descriptor was not stored", extra={"reason": str(error)})

    async def _store(self, items: Sequence[tuple[str, int]]) -> None:
        for name, fd in items:
            await self._notifier.store(name, fd)
            self._held[name] += 1

    async def forget(self, names: Iterable[str]) -> None:
        try:
            async with self._busy:
                for name in names:
                    await self._notifier.remove(name)
                    del self._held[name]
                await self._notifier.barrier()
        except ManagerUnreachable as error:
            log.warning("the vault may still hold what is not wanted any more", extra={"reason": str(error)})

    async def _proof(self) -> Keeping:
        """Is everything that we know of there?"""
        if self._notifier.supervised:
            missing = self._held - Counter(await self._notifier.kept())
            if not missing:
                return Keeping("kept")
            await self._notifier.barrier()  # one that died in its answer looks like less kept; this finds out
            return Keeping("dropped", f"the supervisor does not keep {', '.join(sorted(missing))}: raise --store-max")
        expected = self._held.total()
        found = await _systemd_count(self._unit) if self._unit else None
        if found is not None:
            if found == expected:
                return Keeping("kept")
            return Keeping("dropped", f"systemd keeps {found} of {expected} descriptors: raise FileDescriptorStoreMax=")
        if self._store_max is not None:
            if expected <= self._store_max:
                return Keeping("kept")
            reason = f"systemd keeps at most {self._store_max} of {expected} descriptors: raise FileDescriptorStoreMax="
            return Keeping("dropped", reason)
        return Keeping(
            "unproven",
            f"systemd does not say what it keeps: set Environment={UNIT_VARIABLE}=%n in the unit, and let this user "
            "run `systemctl show`",
        )


async def _systemd_count(unit: str) -> int | None:
    """How many descriptors systemd keeps for ``unit``; ``None`` where it cannot be asked."""
    arguments = ["show", "--property=NFileDescriptorStore", "--value", "--", unit]
    try:
        process = await asyncio.create_subprocess_exec(
            "systemctl", *arguments, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
        )
    except OSError as error:
        log.warning("systemctl cannot be run", extra={"reason": error.strerror})
        return None
    try:
        async with asyncio.timeout(_SYSTEMCTL_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        output = b""
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = output.decode("ascii", "replace").strip()
    if process.returncode or not text.isdigit():
        log.warning("systemctl does not say what is kept", extra={"unit": unit, "answer": text[:100]})
        return None
    return int(text)
