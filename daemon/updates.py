"""All that the keeper has for changing what it serves, put together: made once, begun when something is served, ended.

Owns which part knows which. The control plane is given :attr:`Updates.commands`; who attends to trainers is in the
record.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from weightcached.daemon.change_custody import ChangeCustody
from weightcached.daemon.changing import Changing
from weightcached.daemon.commands import Commands
from weightcached.daemon.custody import Custody
from weightcached.daemon.finding import Finding
from weightcached.daemon.following import Following
from weightcached.daemon.freeing import Freeing
from weightcached.daemon.holding import Holding
from weightcached.daemon.making import Making
from weightcached.daemon.publishing import Publishing
from weightcached.daemon.rank_state import rank_info
from weightcached.daemon.record import Record
from weightcached.daemon.staging import Staging
from weightcached.protocol.control import Decide
from weightcached.protocol.deadline import Deadline
from weightcached.protocol.errors import DaemonDraining, UpdateConflict
from weightcached.protocol.messages import Message
from weightcached.protocol.places import Place

_PATIENCE_S = 2.0

_Answer = TypeVar("_Answer", bound=Message)


class Updates:
    """Of one keeper."""

    def __init__(self, record: Record, custody: Custody, publishing: Publishing, holding: Holding) -> None:
        options = record.options
        self._record = record
        self._custody = custody
        self._holding = holding
        self._freeing = Freeing(record, custody)
        changes = ChangeCustody(custody)
        making = Making(record, changes, self._freeing, Finding(record))
        self.changing = Changing(record, changes, publishing, self._freeing, making, self._give_up)
        leads = rank_info(options.place.name, options.parallel).is_leader
        self._following = None if leads else Following(options.place, self.changing, _ask)
        self.commands = Commands(record, custody, changes, self.changing, self._freeing, self._following)
        self._staging = Staging(record, self.changing, self._freeing, self._give_up)

    def begin(self) -> None:
        """Something is served: take up what the keeper before this one had been told, and had prepared."""
        written, held = self._custody.record, self._record.generations
        if written.keep is not None:
            held.keep = written.keep
        held.pins.update(pinned for pinned in written.pins if held.get(pinned) is not None)
        self.changing.restore()
        self._record.awaits_decision = self.commands.wants
        self._record.staging = self._staging
        self._holding.begin(self.changing.lose)
        self._freeing.start()
        self.commands.follow()

    async def _give_up(self, transaction: str) -> None:
        """Nobody is left who would decide about it. Nothing, where somebody has just done so, or the next keeper has
        to: this one ends.
        """
        if self._following is not None:
            return
        with suppress(UpdateConflict, DaemonDraining):
            await self.commands.handle(Decide(transaction=transaction, commit=False))

    async def stop(self) -> None:
        """End what is under way. What is prepared stays prepared. Safe before :meth:`begin`."""
        if self._following is not None:
            await self._following.stop()
        await self.changing.stop()
        await self._freeing.stop()


async def _ask(place: Place, request: Message, answer: type[_Answer], *, deadline: Deadline) -> _Answer:
    from weightcached.protocol.control_channel import ask  # not before a decision has to be read: it needs ZeroMQ

    # Whoever asks tries again, so that a leader which is not there need not be waited for long.
    return await ask(place, request, answer, deadline=deadline, patience_s=_PATIENCE_S)
