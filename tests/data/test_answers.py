"""The answer out of a worked solution; the forms are those of GSM8K and MATH."""

import pytest

from rlmodule.core.errors import DataError
from rlmodule.data.answers import find_answer
from rlmodule.data.formats import ColumnKeys, choose_columns
from rlmodule.data.row import read_row
from rlmodule.data.tables import MemoryTable


@pytest.mark.parametrize(
    ("text", "mark", "answer"),
    [
        ("He has 9 * 2 = <<9*2=18>>18.\n#### 18", "####", "18"),
        ("#### no\n#### 1,000 ", "####", "1,000"),
        ("no mark", "####", None),
        (r"so $\boxed{\frac{1}{2}}$.", r"\boxed", r"\frac{1}{2}"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\boxed{", r"\frac{1}{2}"),
        (r"first \boxed{1}, then $\boxed{\left\{2\right\}}$", r"\boxed", r"\left\{2\right\}"),
        (r"it is $\boxed 7$.", r"\boxed", "7"),
        (r"it is $\boxed{ 7 }$.", r"\boxed", "7"),
        (r"it is $\fbox{4}$.", r"\boxed", "4"),
        (r"it is $\boxed\pi$.", r"\boxed", r"\pi"),
        (r"it is \boxed{7", r"\boxed", None),
        ("", r"\boxed", None),
    ],
)
def test_what_stands_behind_the_last_mark(text, mark, answer):
    assert find_answer(text, mark) == answer


def test_a_row_without_the_mark_is_named():
    table = MemoryTable("rows.jsonl", [{"question": "q", "answer": "18"}])
    columns = choose_columns(table, "auto", ColumnKeys(answer_after="####"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'answer' has no '####' with an answer behind it"):
        read_row({"question": "q", "answer": "18"}, columns, "rows.jsonl:1")
    assert read_row({"question": "q", "answer": "x #### 18"}, columns, "rows.jsonl:1").answer_value == "18"
    assert read_row({"question": "q"}, columns, "rows.jsonl:1").answer is None
