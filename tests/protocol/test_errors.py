"""The error tree: one root, a code of its own for each class, messages that say what a person needs."""

import inspect

import pytest

from weightcached.protocol import errors
from weightcached.protocol.errors import (
    ABSENT,
    ERRORS_BY_CODE,
    CacheConfigMismatch,
    CheckpointError,
    ConfigurationError,
    ContractError,
    DeploymentError,
    FieldDifference,
    InvalidPlace,
    NotReadyError,
    WeightCacheError,
)

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, WeightCacheError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_is_found_by_a_code_of_its_own(cls) -> None:
    assert "code" in vars(cls)
    assert ERRORS_BY_CODE[cls.code] is cls


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_says_what_it_means_and_stands_in_the_drawing(cls) -> None:
    assert cls.__doc__
    assert cls.__name__ in str(errors.__doc__)


def test_each_leaf_says_what_the_caller_should_do() -> None:
    branches = (NotReadyError, DeploymentError, ConfigurationError, CheckpointError, ContractError)
    for cls in CLASSES:
        assert cls is WeightCacheError or sum(issubclass(cls, branch) for branch in branches) == 1


def test_a_message_has_expected_found_where_and_next_step() -> None:
    error = InvalidPlace("too long", expected="107 bytes", found=0, where="/run/x", next_step="shorten it")
    assert str(error) == "too long; expected: 107 bytes; found: 0; where: /run/x; next step: shorten it"
    assert error.as_fields() == {
        "code": "invalid_place",
        "message": "too long",
        "expected": "107 bytes",
        "found": "0",
        "where": "/run/x",
        "next_step": "shorten it",
    }


def test_parts_that_are_not_given_are_left_out() -> None:
    assert str(WeightCacheError("plain")) == "plain"
    assert WeightCacheError("plain").as_fields()["found"] is None


def test_a_mismatch_names_every_field_with_both_values() -> None:
    fields = (FieldDifference("dtype", "auto", "float16"), FieldDifference("model.window", None, ABSENT))
    error = CacheConfigMismatch("another config", fields=fields, where="/run/x")
    assert error.fields == fields
    assert "dtype: daemon has 'auto', client asks for 'float16'" in str(error)
    assert "model.window: daemon has null, client asks for no entry" in str(error)
    assert "layout" not in str(error.next_step)


def test_a_mismatch_begins_with_the_layout_for_the_rest_follows_from_it() -> None:
    fields = (FieldDifference("engine", ABSENT, {}), FieldDifference("layout", "fused", "hf"))
    error = CacheConfigMismatch("another config", fields=fields)
    assert [one.field for one in error.fields] == ["layout", "engine"]
    assert "(layout='fused')" in str(error.next_step)


def test_a_mismatch_of_huge_values_stays_readable() -> None:
    error = CacheConfigMismatch("another", fields=(FieldDifference("model.labels", "x" * 100_000, "y" * 100_000),))
    assert len(str(error)) < 1_000
