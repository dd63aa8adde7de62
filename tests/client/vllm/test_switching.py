"""Which version all ranks of a vLLM may switch to, by what each has heard. With vLLM itself: tests/engines."""

from types import SimpleNamespace

import pytest

from weightcached.client.vllm.switching import published_version

OLD, DIGEST, RECEIPTS, OTHERS = "receipts:0", "digest:1", "receipts:1", "receipts:2"


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([()], None),
        ([(DIGEST, RECEIPTS)], DIGEST),
        ([(DIGEST, RECEIPTS), (DIGEST, RECEIPTS)], DIGEST),
        ([(DIGEST, RECEIPTS), (RECEIPTS, RECEIPTS)], RECEIPTS),  # the second did not know its digest yet
        ([(RECEIPTS, RECEIPTS), (DIGEST, RECEIPTS)], RECEIPTS),
        ([(DIGEST, RECEIPTS), (DIGEST, OTHERS)], DIGEST),  # one content, by other files
        ([(DIGEST, RECEIPTS), ()], None),
        ([(DIGEST, RECEIPTS), (OLD, OLD)], None),
    ],
)
def test_a_version_is_published_when_all_ranks_have_one_in_common(
    ranks: list[tuple[str, ...]], found: str | None
) -> None:
    assert published_version(SimpleNamespace(collective_rpc=lambda method: ranks)) == found
