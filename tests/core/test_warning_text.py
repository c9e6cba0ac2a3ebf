"""Warnings on the terminal."""

import warnings
from pathlib import Path

import rlmodule
from rlmodule.core.warning_text import format_warning


def test_a_warning_of_ours_is_a_line_of_words():
    own = str(Path(rlmodule.__file__).parent / "datamodule.py")
    assert format_warning("all was cut", UserWarning, own, 3, "warn()") == "warning: all was cut\n"


def test_a_warning_of_others_says_where_it_is_from():
    for category, file in ((UserWarning, "/lib/other.py"), (DeprecationWarning, rlmodule.__file__)):
        text = format_warning("old", category, file, 3, "old()")
        assert text == warnings.formatwarning("old", category, file, 3, "old()")
        assert f"{file}:3" in text
