"""Is what we hold what this engine asked for? Decides in one place, from receipts, digests and ``want``; pure but for
memory.

Owns the decision and the set of foreign receipts that were proven once. Configs are compared before (``refusals.py``);
what is done with a verdict (send, wait, compute a digest) is the connection's business (``attaching.py``).
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from weightcached.daemon.generation import Generation
from weightcached.daemon.state_record import PROVEN_MAX
from weightcached.protocol.errors import CheckpointMismatch, CheckpointUnproven, WeightCacheError
from weightcached.protocol.messages import Hello


@dataclass(frozen=True, slots=True)
class Granted:
    """It is. ``rule`` says what proved it, for the log."""

    rule: str


@dataclass(frozen=True, slots=True)
class NeedsOurDigest:
    """The client stated a digest (or a version) that only our own digest can confirm, and we do not know it yet."""


@dataclass(frozen=True, slots=True)
class NotProven:
    """Receipts do not prove it: the client may state its digest."""

    reason: str
    rule: str


@dataclass(frozen=True, slots=True)
class Denied:
    """It is not, or never can be shown to be."""

    error: WeightCacheError


Verdict = Granted | NeedsOurDigest | NotProven | Denied


class ProvenReceipts:
    """Receipts of other views of our files (another mount) that a digest has proven; the oldest are forgotten first.

    Belongs to one generation. Only receipts that their sender trusts get in: others prove nothing the next time either.
    That the receipts are of files with that digest is the sender's word, so it counts for its own user only: a hostile
    engine must not have another user's checkpoint taken for ours. Root's word and our own count for everybody.
    ``on_new`` is called after one that was not known.
    """

    def __init__(
        self, known: Iterable[str] = (), *, at_most: int = PROVEN_MAX, on_new: Callable[[], None] | None = None
    ) -> None:
        self._at_most = at_most
        self._known: OrderedDict[str, None] = OrderedDict.fromkeys(known)
        self.on_new = on_new

    def hold_for(self, uid: int, receipts: str) -> bool:
        """Whether somebody whose word counts for user ``uid`` has proven them."""
        return any(_entry(vouching, receipts) in self._known for vouching in (0, uid))

    def __iter__(self) -> Iterator[str]:
        """The entries to be kept for the next keeper, oldest first."""
        return iter(self._known)

    def remember(self, uid: int, receipts: str) -> None:
        """User ``uid`` has proven them."""
        entry = _entry(uid, receipts)
        new = entry not in self._known
        self._known[entry] = None
        self._known.move_to_end(entry)
        while len(self._known) > self._at_most:
            self._known.popitem(last=False)
        if new and self.on_new is not None:
            self.on_new()


def _entry(uid: int, receipts: str) -> str:
    """What is remembered, 64 hex digits: whose word it is, and on what."""
    whose = "everybody" if uid in (0, os.geteuid()) else str(uid)
    return hashlib.sha256(f"{whose} {receipts}".encode()).hexdigest()


def prove(hello: Hello, generation: Generation, proven: ProvenReceipts, *, uid: int) -> Verdict:
    """Compare what the client, of user ``uid``, wants with ``generation``. Remembers receipts that a digest proves, in
    ``proven``.
    """
    if hello.want == "current":
        return Granted("the client takes whatever is current")
    if hello.want != "checkpoint":
        return _version(hello.want, generation)
    if generation.pushed_by is not None:
        return _pushed(generation)
    ours = generation.digest
    if hello.digest is not None and ours is not None:
        if hello.digest != ours:
            return Denied(
                CheckpointMismatch(
                    "the daemon's weights come from another checkpoint",
                    expected=f"content digest {hello.digest}",
                    found=f"content digest {ours}",
                    where=generation.provenance.path,
                    next_step="start a daemon on the engine's checkpoint, or point the engine at the daemon's",
                )
            )
        if hello.receipts is not None and hello.receipts_trusted:
            proven.remember(uid, hello.receipts)
        return Granted("equal content digests")
    by_receipts = _receipts(hello, generation, proven, uid)
    if hello.digest is not None and not isinstance(by_receipts, Granted):
        return NeedsOurDigest()
    return by_receipts


def _version(want: str, generation: Generation) -> Verdict:
    if want in (generation.version, generation.receipts_version):
        return Granted("the version that was asked for")
    if generation.digest is None and generation.pushed_by is None:
        return NeedsOurDigest()
    return Denied(
        CheckpointMismatch(
            "the daemon holds another version",
            expected=want,
            found=generation.version,
            where=generation.provenance.path,
            next_step='ask for the version that is here, or for "checkpoint" or "current"',
        )
    )


def _pushed(generation: Generation) -> Verdict:
    return Denied(
        CheckpointMismatch(
            "the daemon's weights were pushed to it, and are no checkpoint's",
            expected="exactly the engine's checkpoint",
            found=f"version {generation.version}, pushed by {generation.pushed_by}",
            next_step='ask for "current" if what was pushed is meant',
        )
    )


def _receipts(hello: Hello, generation: Generation, proven: ProvenReceipts, uid: int) -> Verdict:
    ours = generation.receipts
    if hello.receipts is None:
        return Denied(
            CheckpointUnproven(
                "nothing says which checkpoint the engine means: it sees no weight files and states no digest",
                expected="receipts or a content digest",
                found="neither",
                next_step="pass the digest: the first word that `weightcached digest DIR` prints where the weights are",
            )
        )
    if not hello.receipts_trusted:
        rule = "the client's files lie where inode and ctime are not trusted"
        return NotProven("receipts of the client's files prove nothing", rule)
    if proven.hold_for(uid, hello.receipts):
        return Granted("receipts that a digest proved before")
    if not ours.trusted:
        return NotProven("receipts of the daemon's files prove nothing", ours.rule or "not trusted there")
    if hello.receipts != ours.sha256:
        rule = "equal receipts prove equal content; different receipts prove nothing"
        return NotProven("the client's receipts are not those of the files that were loaded", rule)
    return Granted(f"equal receipts ({ours.rule})" if ours.rule else "equal receipts")
