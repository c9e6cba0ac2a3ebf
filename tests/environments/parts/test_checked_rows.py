"""Rows of an environment are checked where they come in, whoever wrote it."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.environments.parts.checked_rows import checked_rows

ROW = {"prompt": "2 + 3?", "answer": "5"}


@pytest.mark.parametrize("given", [[ROW, ROW], (ROW, ROW), (row for row in [ROW, ROW])])
def test_rows_may_be_any_iterable(given):
    assert checked_rows(given, "mine", "train") == [ROW, ROW]


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
        checked_rows(given, "mine", "test")
