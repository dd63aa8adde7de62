"""Every way in which two holders can differ is found, once, and named."""

from dataclasses import replace

import pytest

from tests.engines.held import Difference, Held, differences

WEIGHT = Held("bfloat16", (4, 2), "aa", ("a",))


def test_equal_holders_do_not_differ():
    assert differences({"a": WEIGHT}, {"a": replace(WEIGHT)}) == []


@pytest.mark.parametrize(
    ("changed", "what", "theirs", "mine"),
    [
        ({"dtype": "float16", "sha256": "bb"}, "dtype", "bfloat16", "float16"),
        ({"shape": (2, 4), "sha256": "bb"}, "shape", (4, 2), (2, 4)),
        ({"sha256": "bb"}, "sha256", "aa", "bb"),
        ({"names": ("a", "b")}, "names", ("a",), ("a", "b")),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(changed, what, theirs, mine):
    assert differences({"a": WEIGHT}, {"a": replace(WEIGHT, **changed)}) == [Difference("a", what, theirs, mine)]


def test_a_name_that_only_one_has_is_a_difference():
    assert differences({"a": WEIGHT}, {}) == [Difference("a", "name", "bfloat16[4, 2]", "has none")]
    assert differences({}, {"a": WEIGHT}) == [Difference("a", "name", "has none", "bfloat16[4, 2]")]
