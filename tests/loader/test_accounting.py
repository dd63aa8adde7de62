"""The four sets of names, and what is said when they do not balance."""

import pytest

from weightcached.loader.accounting import NAMES_SHOWN, account, shown
from weightcached.protocol.errors import MissingTensor, UnexpectedTensor


def test_every_name_is_in_the_set_it_belongs_to():
    made = account(
        expected=["both", "gone"],
        present=["both", "cache", "stranger"],
        ignored={"cache": "computed", "absent": "not there", "both": "needed after all"},
    )
    assert made.expected == {"both", "gone"}
    assert made.loaded == {"both"}
    assert made.ignored == {"cache": "computed"}
    assert made.unexpected == {"stranger"}
    assert made.missing == {"gone"}
    assert not made.balanced


def test_missing_names_come_first_and_unexpected_ones_are_told_with_them():
    made = account(expected=["a", "b"], present=["b", "c"], ignored={})
    with pytest.raises(MissingTensor) as caught:
        made.require_balance(where="file", hint="look there")
    error = caught.value
    assert (error.expected, error.where, error.next_step) == ("a", "file", "look there")
    assert "c" in str(error.found)


def test_unexpected_names():
    with pytest.raises(UnexpectedTensor, match="c, d"):
        account(expected=["a"], present=["a", "d", "c"], ignored={}).require_balance()


def test_a_balanced_account():
    made = account(expected=["a"], present=["a", "b"], ignored={"b": "why not"})
    made.require_balance()
    assert made.balanced


def test_long_lists_are_cut():
    names = [f"{i:03}" for i in range(NAMES_SHOWN + 1)]
    assert shown(names[:-1]) == ", ".join(names[:-1])
    assert shown(reversed(names)) == ", ".join(names[:-1]) + " and 1 more"
