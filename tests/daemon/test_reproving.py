"""Are the files that lie there now the ones that were loaded? Every combination of what is known and what is found."""

import pytest

from weightcached.daemon.digesting import DigestAnswer
from weightcached.daemon.generation import CheckpointReceipts, Evidence, Origin
from weightcached.daemon.reproving import Contradicted, Proven, Undecidable, compare

OURS, OTHER = "a" * 64, "b" * 64
DIGEST, ANOTHER = "1" * 64, "2" * 64


def known(digest: str | None, *, trusted: bool = True) -> Evidence:
    return Evidence(digest, CheckpointReceipts(OURS, trusted=trusted, rule="a rule"), "/models/m")


def found(digest: str, receipts: str | None = OURS, *, settled: bool = True) -> DigestAnswer:
    return DigestAnswer(digest, receipts, settled, "a rule")


@pytest.mark.parametrize(
    ("evidence", "answer", "kind"),
    [
        # a digest decides, whatever receipts say
        (known(DIGEST), found(DIGEST), Proven),
        (known(DIGEST), found(DIGEST, OTHER), Proven),
        (known(DIGEST), found(DIGEST, None), Proven),
        (known(DIGEST, trusted=False), found(DIGEST, OTHER, settled=False), Proven),
        (known(DIGEST), found(ANOTHER), Contradicted),
        (known(DIGEST), found(ANOTHER, OTHER), Contradicted),
        # without one, only receipts that prove something on both sides
        (known(None), found(DIGEST), Proven),
        (known(None), found(DIGEST, OTHER), Undecidable),
        (known(None), found(DIGEST, None), Undecidable),
        (known(None), found(DIGEST, settled=False), Undecidable),
        (known(None, trusted=False), found(DIGEST), Undecidable),
    ],
)
def test_the_table(evidence: Evidence, answer: DigestAnswer, kind: type) -> None:
    assert type(compare(evidence, answer)) is kind


def test_a_contradiction_says_what_to_do() -> None:
    verdict = compare(known(DIGEST), found(ANOTHER))
    assert isinstance(verdict, Contradicted)
    assert DIGEST in str(verdict.error.expected)
    assert ANOTHER in str(verdict.error.found)
    assert "/models/m" in str(verdict.error.where)
    assert "weightcached release" in str(verdict.error.next_step)


@pytest.mark.parametrize(
    ("origin", "model", "same"),
    [
        (Origin("/models/m", None), "/models/m", True),
        (Origin("/models/m", None), "/models/x/../m/", True),
        (Origin("/models/m", None), "/models/n", False),
        (Origin("/cache/snapshots/1", "org/m"), "org/m", True),
        (Origin("/cache/snapshots/1", "org/m"), "/cache/snapshots/1", True),
        (Origin("/cache/snapshots/1", "org/m"), "org/n", False),
        (Origin("/models/m", None), "m", False),
    ],
)
def test_what_a_model_option_names(origin: Origin, model: str, same: bool) -> None:
    assert origin.is_what(model) is same
