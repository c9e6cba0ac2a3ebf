"""A table of other projects' rows and what becomes of them."""

import pytest

from rlmodule.core.errors import DataError
from rlmodule.data.formats import FORMATS, ColumnKeys, choose_columns
from rlmodule.data.row import Row, read_row
from rlmodule.data.tables import MemoryTable

TURNS = [{"role": "user", "content": "2+2?"}]
SAID = [{"role": "assistant", "content": "4"}]

EXAMPLES = {
    "task of our own": (
        {"prompt": "3 7 2 -> 8", "answer": "8", "source": "countdown", "numbers": [3, 7, 2]},
        Row("3 7 2 -> 8", "8", "countdown", None, {"answer": "8", "source": "countdown", "numbers": [3, 7, 2]}),
    ),
    "our own, meta as JSON": (
        {"messages": TURNS, "answer": "4", "meta": '{"level": 1}'},
        Row(TURNS, "4", "", None, {"answer": "4", "level": 1, "messages": TURNS}),
    ),
    "verl": (
        {
            "data_source": "gsm8k",
            "prompt": TURNS,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 7},
        },
        Row(
            TURNS,
            "4",
            "gsm8k",
            None,
            {
                "data_source": "gsm8k",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "split": "train",
                "index": 7,
                "messages": TURNS,
            },
        ),
    ),
    "verl, ground truth with structure": (
        {"data_source": "c", "prompt": "p", "reward_model": {"ground_truth": {"target": 8, "numbers": [3]}}},
        Row(
            "p",
            '{"target": 8, "numbers": [3]}',
            "c",
            None,
            {"data_source": "c", "reward_model": {"ground_truth": {"target": 8, "numbers": [3]}}},
        ),
    ),
    "TRL, reinforcement": (
        {"prompt": TURNS, "solution": 4, "difficulty": 0.5},
        Row(TURNS, "4", "", None, {"solution": 4, "difficulty": 0.5, "messages": TURNS}),
    ),
    "TRL, supervised": (
        {"prompt": "2+2?", "completion": "4"},
        Row("2+2?", None, "", "4", {"completion": "4"}),
    ),
    "TRL, conversation": (
        {"messages": TURNS + SAID},
        Row(TURNS + SAID, None, "", None, {"messages": TURNS + SAID}),
    ),
    "OpenRLHF": (
        {"input": "2+2?", "output": "4", "label": "4", "datasource": "s"},
        Row("2+2?", "4", "s", "4", {"output": "4", "label": "4", "datasource": "s"}),
    ),
    "verifiers": (
        {"question": "2+2?", "answer": "4", "info": '{"hint": "even"}', "task": "sums"},
        Row("2+2?", "4", "sums", None, {"answer": "4", "hint": "even", "task": "sums"}),
    ),
    "verifiers, null info": (
        {"prompt": TURNS, "answer": "4", "info": None},
        Row(TURNS, "4", "", None, {"answer": "4", "messages": TURNS}),
    ),
    "turns from parquet, where every turn has every key": (
        {"prompt": [{"role": "user", "content": "2+2?", "tool_calls": None}], "answer": "4"},
        Row(TURNS, "4", "", None, {"answer": "4", "messages": TURNS}),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_of_other_projects_are_recognised(name):
    raw, expected = EXAMPLES[name]
    columns = choose_columns(MemoryTable("file", [raw]), "auto", ColumnKeys())
    assert read_row(raw, columns, "file:1") == expected


def test_named_columns_win_and_reach_into_mappings():
    raw = {"prompt": "no", "problem": {"text": "yes"}, "answer": "no", "final.answer": "yes"}
    keys = ColumnKeys(prompt="problem.text", answer="final.answer", source="prompt")
    row = read_row(raw, choose_columns(MemoryTable("file", [raw]), "auto", keys), "file:1")
    assert (row.prompt, row.answer, row.source) == ("yes", "yes", "no")


def test_columns_of_no_known_format_are_listed():
    table = MemoryTable("rows.jsonl", [{"puzzle": "x", "answer": "y"}])
    with pytest.raises(
        DataError, match=r"rows\.jsonl: no column 'prompt'.* columns are puzzle, answer\. Set data\.prompt_key"
    ):
        choose_columns(table, "auto", ColumnKeys())
    with pytest.raises(
        DataError, match=r"there is no column 'labels'; its columns are puzzle, answer\. Set data\.answer_key"
    ):
        choose_columns(table, "auto", ColumnKeys(prompt="puzzle", answer="labels"))
    for name in FORMATS:
        assert choose_columns(table, name, ColumnKeys(prompt="puzzle")).prompt == "puzzle"


def test_a_row_without_a_required_value_is_named():
    rows = [{"prompt": "x", "label": "1"}, {"text": "y", "label": "1"}, {"prompt": "z", "label": None}]
    columns = choose_columns(MemoryTable("file", rows), "auto", ColumnKeys(answer="label"))
    assert read_row(rows[0], columns, "file:1").answer == "1"
    with pytest.raises(DataError, match="file:2: the row has no 'prompt'; its columns are text, label"):
        read_row(rows[1], columns, "file:2")
    with pytest.raises(DataError, match="file:3: the row has no 'label'"):
        read_row(rows[2], columns, "file:3")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"prompt": 3, "meta": None}, "column 'prompt': a prompt is a text or a list of turns, this is int 3"),
        ({"prompt": "x", "meta": "{"}, "column 'meta' is not JSON"),
        (
            {"prompt": "x", "completion": [{"content": "y"}]},
            "column 'completion': turn 1 must be a mapping with a role",
        ),
    ],
)
def test_a_value_that_is_not_what_it_should_be_is_named(raw, reason):
    columns = choose_columns(MemoryTable("file", [raw]), "auto", ColumnKeys())
    with pytest.raises(DataError, match=f"file:1: {reason}"):
        read_row(raw, columns, "file:1")
