"""What options share: a value that cannot be used ends with the usage status and says what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightcached.protocol.command_line import USAGE_EXIT, Parser, positive_seconds, seconds, whole_number


def parse(convert: Callable[[str], float], text: str) -> float:
    parser = Parser(prog="weightcached x", description="")
    parser.add_argument("--value", type=convert)
    value: float = parser.parse_args([f"--value={text}"]).value
    return value


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (seconds, "0", 0.0),
        (seconds, "1.5", 1.5),
        (positive_seconds, "86400", 86400.0),
        (whole_number(1), "1", 1),
        (whole_number(0, 65535), "65535", 65535),
    ],
)
def test_a_value_in_range_is_taken(convert: Callable[[str], float], text: str, value: float) -> None:
    assert parse(convert, text) == value


@pytest.mark.parametrize(
    ("convert", "text", "expected"),
    [
        *((seconds, text, "seconds from 0 to 86400") for text in ("", "soon", "-1", "86401", "inf", "nan")),
        (positive_seconds, "0", "seconds over 0"),
        *(
            (whole_number(1), text, "a whole number of at least 1")
            for text in ("", "two", "0", "-1", "1.5", "9" * 5000)
        ),
        (whole_number(0, 7), "8", "a whole number from 0 to 7"),
    ],
)
def test_any_other_is_refused_in_words(
    convert: Callable[[str], float], text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(convert, text)
    assert caught.value.code == USAGE_EXIT
    assert expected in capsys.readouterr().err
