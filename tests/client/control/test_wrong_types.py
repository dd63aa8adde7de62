"""Python's functions for live weights, given what is of another type than they take: the error names it, and is ours.

Whoever passes them on from a configuration file meets that; nobody is asked anything before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightcached.client.control import drop, generations, pin, resolve, rollback, update
from weightcached.client.publish import publish, stage
from weightcached.protocol.errors import InvalidOption

WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "update(3)": (lambda **at: update(3, **at), "the model", "int"),  # type: ignore[arg-type]
    "update(None)": (lambda **at: update(None, **at), "the model", "NoneType"),  # type: ignore[arg-type]
    "update(b'')": (lambda **at: update(b"/models/m", **at), "the model", "bytes"),  # type: ignore[arg-type]
    "rollback(3)": (lambda **at: rollback(3, **at), "version to roll back to", "3"),  # type: ignore[arg-type]
    "rollback(b'')": (lambda **at: rollback(b"digest:1", **at), "version to roll back", "b'dig"),  # type: ignore[arg-type]
    "rollback('')": (lambda **at: rollback("", **at), "version to roll back to", "''"),
    "pin('')": (lambda **at: pin("", **at), "version or generation", "''"),
    "drop('')": (lambda **at: drop("", **at), "version or generation", "''"),
    "pin(3)": (lambda **at: pin(3, **at), "version or generation", "3"),  # type: ignore[arg-type]
    "pin(None)": (lambda **at: pin(None, **at), "version or generation", "None"),  # type: ignore[arg-type]
    "pin(pinned='no')": (lambda **at: pin("a", pinned="no", **at), "pinned", "'no'"),  # type: ignore[arg-type]
    "drop(3)": (lambda **at: drop(3, **at), "version or generation", "3"),  # type: ignore[arg-type]
    "drop(force='no')": (lambda **at: drop("a", force="no", **at), "force", "'no'"),  # type: ignore[arg-type]
    "publish(None)": (lambda **at: publish(None, **at), "no tensors", "NoneType"),  # type: ignore[arg-type]
    "publish(3)": (lambda **at: publish(3, **at), "no tensors", "int"),  # type: ignore[arg-type]
    "trainer=3": (lambda **at: stage(trainer=3, **at), "trainer", "3"),  # type: ignore[arg-type]
    "partial='no'": (lambda **at: stage(partial="no", **at), "partial", "'no'"),  # type: ignore[arg-type]
    "bucket_nbytes='1'": (lambda **at: stage(bucket_nbytes="1", **at), "size for a bucket", "'1'"),  # type: ignore[arg-type]
    "bucket_count=1.5": (lambda **at: stage(bucket_count=1.5, **at), "number of buckets", "1.5"),  # type: ignore[arg-type]
}
CHANGES: dict[str, Callable[..., Any]] = {
    "update": lambda **given: update("/", **given),
    "rollback": rollback,
    "stage": lambda **given: stage(**given).__enter__(),
}
ANY: dict[str, Callable[..., Any]] = {**CHANGES, "resolve": resolve, "generations": generations}


@pytest.mark.parametrize("call", WRONG)
def test_an_argument_of_another_type_is_named(call: str, runtime_dir: Path) -> None:
    function, what, found = WRONG[call]
    with pytest.raises(InvalidOption, match=f"{what}.*expected: .*found: .*{found}"):
        function(runtime_dir=runtime_dir)


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        *((function, option, value) for function in CHANGES for option, value in (("wait", "no"), ("force", 1))),
        *((function, "align", "no") for function in ("update", "rollback")),
        *((function, "keep", value) for function in ("update", "stage") for value in ("1", 1.0, True)),
    ],
)
def test_an_option_of_a_change_of_another_type_is_named(
    function: str, option: str, value: Any, runtime_dir: Path
) -> None:
    what = "number of earlier generations" if option == "keep" else option
    with pytest.raises(InvalidOption, match=rf"unusable {what}; expected: .*; found: {value!r}"):
        CHANGES[function](runtime_dir=runtime_dir, **{option: value})


@pytest.mark.parametrize("function", ANY)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("runtime_dir", 3),
        ("runtime_dir", b"/run"),
        ("name", 3),
        ("name", None),
        ("name", "a/b"),
        ("timeout_s", "3"),
        ("timeout_s", None),
        ("timeout_s", float("nan")),
        ("timeout_s", -1),
        ("allowed", ["root"]),
    ],
    ids=str,
)
def test_which_group_is_meant_is_looked_at_before_anybody_is_asked(
    function: str, option: str, value: Any, runtime_dir: Path
) -> None:
    with pytest.raises(InvalidOption, match=rf"{option.replace('_', '.')[:7]}.*found: .*{str(value)[-3:-1]}"):
        ANY[function](**{"runtime_dir": runtime_dir, option: value})
