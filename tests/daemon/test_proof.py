"""The proof table: what receipts, digests and `want` lead to, for every combination that differs in its outcome."""

import dataclasses
import os

import pytest

from tests.support.generations import OURS, generation
from weightcached.daemon import proof
from weightcached.daemon.generation import Generation
from weightcached.daemon.proof import Denied, Granted, NeedsOurDigest, NotProven, ProvenReceipts, Verdict
from weightcached.protocol.errors import CheckpointMismatch, CheckpointUnproven
from weightcached.protocol.messages import Hello

THEIRS = "b" * 64
DIGEST, OTHER = "1" * 64, "2" * 64


OURSELVES = os.geteuid()
ENGINE, STRANGER = 70_001, 70_002


def prove(asked: Hello, held: Generation, proven: ProvenReceipts, *, uid: int = OURSELVES) -> Verdict:
    return proof.prove(asked, held, proven, uid=uid)


def hello(
    *, receipts: str | None = None, trusted: bool = True, digest: str | None = None, want: str = "checkpoint"
) -> Hello:
    return Hello(
        client_version="1",
        name="t",
        pid=1,
        config={},
        fingerprint="0" * 64,
        receipts=receipts,
        receipts_trusted=trusted,
        digest=digest,
        want=want,
        wait_s=0,
    )


@pytest.mark.parametrize(
    ("asked", "held", "kind"),
    [
        # equal receipts prove it, where both sides trust them
        (hello(receipts=OURS), generation(), Granted),
        (hello(receipts=OURS), generation(digest=DIGEST), Granted),
        (hello(receipts=OURS, trusted=False), generation(digest=DIGEST), NotProven),
        (hello(receipts=OURS), generation(digest=DIGEST, trusted=False), NotProven),
        (hello(receipts=THEIRS), generation(digest=DIGEST), NotProven),
        # a digest decides, whatever the receipts say
        (hello(receipts=THEIRS, digest=DIGEST), generation(digest=DIGEST), Granted),
        (hello(receipts=THEIRS, trusted=False, digest=DIGEST), generation(digest=DIGEST, trusted=False), Granted),
        (hello(digest=DIGEST), generation(digest=DIGEST), Granted),
        (hello(receipts=OURS, digest=OTHER), generation(digest=DIGEST), Denied),
        (hello(digest=OTHER), generation(digest=DIGEST), Denied),
        # while ours is not known, equal receipts still do, and everything else waits for it
        (hello(receipts=OURS, digest=DIGEST), generation(), Granted),
        (hello(receipts=THEIRS, digest=DIGEST), generation(), NeedsOurDigest),
        (hello(receipts=OURS, digest=DIGEST), generation(trusted=False), NeedsOurDigest),
        (hello(digest=DIGEST), generation(), NeedsOurDigest),
        # nothing to prove it with
        (hello(), generation(digest=DIGEST), Denied),
        # whatever is current
        (hello(want="current"), generation(), Granted),
        (hello(want="current", receipts=THEIRS, digest=OTHER), generation(digest=DIGEST), Granted),
    ],
)
def test_the_table(asked: Hello, held: Generation, kind: type) -> None:
    assert type(prove(asked, held, ProvenReceipts())) is kind


def test_the_two_ways_to_be_denied() -> None:
    differ = prove(hello(digest=OTHER), generation(digest=DIGEST), ProvenReceipts())
    assert isinstance(differ, Denied)
    assert isinstance(differ.error, CheckpointMismatch)
    nothing = prove(hello(), generation(digest=DIGEST), ProvenReceipts())
    assert isinstance(nothing, Denied)
    assert isinstance(nothing.error, CheckpointUnproven)


def test_a_version_is_the_one_by_digest_or_the_one_that_stood_in() -> None:
    known, unknown = generation(digest=DIGEST), generation()
    for want in (known.version, known.receipts_version):
        assert isinstance(prove(hello(want=want), known, ProvenReceipts()), Granted)
    assert unknown.version == unknown.receipts_version == known.receipts_version != known.version
    assert isinstance(prove(hello(want=known.version), unknown, ProvenReceipts()), NeedsOurDigest)
    other = prove(hello(want="digest:ff"), known, ProvenReceipts())
    assert isinstance(other, Denied)
    assert isinstance(other.error, CheckpointMismatch)
    assert other.error.found == known.version


def test_foreign_receipts_are_remembered_once_a_digest_proved_them() -> None:
    proven = ProvenReceipts()
    held = generation(digest=DIGEST, trusted=False)
    assert isinstance(prove(hello(receipts=THEIRS), held, proven), NotProven)
    assert isinstance(prove(hello(receipts=THEIRS, digest=DIGEST), held, proven), Granted)
    assert isinstance(prove(hello(receipts=THEIRS), held, proven), Granted)
    assert isinstance(prove(hello(receipts=THEIRS, trusted=False), held, proven), NotProven)


def test_receipts_that_nobody_trusts_or_that_mismatched_are_not_remembered() -> None:
    proven = ProvenReceipts()
    held = generation(digest=DIGEST)
    prove(hello(receipts=THEIRS, trusted=False, digest=DIGEST), held, proven)
    prove(hello(receipts=THEIRS, digest=OTHER), held, proven)
    assert isinstance(prove(hello(receipts=THEIRS), held, proven), NotProven)


def test_the_oldest_proven_receipts_are_forgotten_first() -> None:
    proven = ProvenReceipts(at_most=2)
    for name in ("first", "second", "first", "third"):
        proven.remember(0, name)
    assert not proven.hold_for(0, "second")
    assert proven.hold_for(0, "first")
    assert proven.hold_for(0, "third")


def test_what_one_user_says_of_receipts_does_not_count_for_another() -> None:
    """A hostile engine says that the receipts of somebody's checkpoint are those of files with our digest. Whose
    checkpoint it is must not be given our weights for it.
    """
    held, proven = generation(digest=DIGEST), ProvenReceipts()
    assert isinstance(prove(hello(receipts=THEIRS, digest=DIGEST), held, proven, uid=STRANGER), Granted)
    for uid in (ENGINE, 0, OURSELVES):
        assert isinstance(prove(hello(receipts=THEIRS), held, proven, uid=uid), NotProven)
    assert isinstance(prove(hello(receipts=THEIRS), held, proven, uid=STRANGER), Granted)
    kept = ProvenReceipts(proven)  # by the next keeper
    assert isinstance(prove(hello(receipts=THEIRS), held, kept, uid=STRANGER), Granted)
    assert isinstance(prove(hello(receipts=THEIRS), held, kept, uid=ENGINE), NotProven)
    for entry in proven:  # nor do the words in which it is kept help anybody
        assert isinstance(prove(hello(receipts=entry), held, kept, uid=STRANGER), NotProven)


@pytest.mark.parametrize("uid", [0, OURSELVES])
def test_what_root_and_the_daemons_own_user_say_counts_for_everybody(uid: int) -> None:
    held, proven = generation(digest=DIGEST), ProvenReceipts()
    prove(hello(receipts=THEIRS, digest=DIGEST), held, proven, uid=uid)
    assert isinstance(prove(hello(receipts=THEIRS), held, proven, uid=STRANGER), Granted)


def test_a_digest_that_becomes_known_changes_the_version_and_nothing_else() -> None:
    before = generation()
    after = before.with_digest(DIGEST)
    assert dataclasses.replace(after, digest=None) == before
    assert after.memory is before.memory
    assert after.version.startswith("digest:")
    assert before.version.startswith("receipts:")
