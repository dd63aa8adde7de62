"""The helper for forked children: what fails there fails here."""

import os

import pytest

from tests.support.forked import in_child
from tests.support.unprivileged import NOBODY


def test_an_error_in_the_child_is_an_error_here() -> None:
    in_child(lambda: None)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0)
    with pytest.raises(AssertionError, match="SystemExit"):
        in_child(lambda: exec("raise SystemExit(0)"))
    with pytest.raises(AssertionError, match="status 9"):
        in_child(lambda: os.kill(os.getpid(), 9))


@pytest.mark.root
def test_the_child_is_the_other_user() -> None:
    with pytest.raises(AssertionError, match=f"ValueError: {NOBODY} {NOBODY}"):
        in_child(lambda: exec("import os; raise ValueError(f'{os.getuid()} {os.getegid()}')"), uid=NOBODY)
