"""Rows of an environment are checked where they come in, whoever wrote it."""

from types import SimpleNamespace

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.parts.checked_rows import checked_rows


def checked(given, split="test"):
    return checked_rows(SimpleNamespace(rows=lambda asked: given if asked == split else None), "mine", split)


ROW = {"prompt": "2 + 3?", "answer": "5"}


@pytest.mark.parametrize("given", [[ROW, ROW], (ROW, ROW), (row for row in [ROW, ROW])])
def test_rows_may_be_any_iterable(given):
    assert checked(given) == [ROW, ROW]


@pytest.mark.parametrize(
    ("given", "because"),
    [
        (None, r"rows\('test'\) gave NoneType None, which is no list of rows"),
        (ROW, r"rows\('test'\) gave dict .*, which is no list of rows"),
        ("2 + 3?", r"gave str '2 \+ 3\?', which is no list of rows"),
        (5, "gave int 5, which is no list of rows"),
        ([], r"rows\('test'\) gave no row"),
        ([ROW, "2 + 3?"], r"row 2 of rows\('test'\) is '2 \+ 3\?' and no mapping of column names to values"),
        ([{1: "2 + 3?"}], r"row 1 of rows\('test'\) is .* and no mapping of column names to values"),
    ],
)
def test_what_is_no_rows_is_refused(given, because):
    with pytest.raises(ConfigError, match=rf"environment=mine: .*{because}\. Have rows\('test'\) return a list of"):
        checked(given)


def test_an_error_of_the_user_s_code_is_told_with_its_line():
    def rows(split):
        raise OSError(f"no data set for {split}")

    def later(split):
        yield ROW
        raise OSError(f"no data set for {split}")

    for function in (rows, later):
        with pytest.raises(
            ConfigError, match=r"environment=mine: rows\('test'\) fails\. Its own words:(.|\n)*no data set"
        ):
            checked_rows(SimpleNamespace(rows=function), "mine", "test")
