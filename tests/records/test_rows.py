"""Lines of JSON: whatever a text holds, it is one line, and comes back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.records.rows import json_line

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # whatever str.splitlines() takes for the end of a line


@given(st.text(st.one_of(st.sampled_from([*ENDS, "\\", '"']), st.characters(exclude_categories=()))))
def test_a_row_is_one_line_for_every_reader_and_comes_back(text):
    line = json_line({"response": text, text: 1})
    assert len(line.decode().splitlines()) == len(line.splitlines()) == 1
    assert json.loads(line) == {"response": text, text: 1}


def test_text_of_other_scripts_stays_readable():
    assert json_line({"a": "né 你好"}).decode() == '{"a": "né 你好"}\n'
    with pytest.raises(TypeError):
        json_line({"a": {1}})
    assert json_line({"a": {1}}, default=str) == b'{"a": "{1}"}\n'
