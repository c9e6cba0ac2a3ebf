"""Conversations in other projects' words become turns with role and content; what is unclear is refused."""

import pytest

from rlmodule.core.errors import DataError
from rlmodule.data.formats import ColumnKeys, choose_columns
from rlmodule.data.messages import ChatError
from rlmodule.data.row import read_row
from rlmodule.data.tables import MemoryTable
from rlmodule.data.turns import read_conversation

HH = {"\n\nHuman:": "user", "\n\nAssistant:": "assistant"}
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}


def row_of(raw, **keys):
    return read_row(raw, choose_columns(MemoryTable("rows.jsonl", [raw]), "auto", ColumnKeys(**keys)), "rows.jsonl:1")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello!"}], [ASKED, SAID]),
        ([{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "Hello!"}], [ASKED, SAID]),
        ([{"from": "system", "value": "S"}, {"from": "human", "value": "hi"}], [{"role": "system", "content": "S"}, ASKED]),
        ([{"from": "tool", "value": "7"}], [{"role": "tool", "content": "7"}]),
        ([{"from": "gpt", "value": "Hello!", "weight": 1}], [{**SAID, "weight": 1}]),
        ([{"role": "user", "content": "hi", "from": None}], [ASKED]),
        (ASKED, [ASKED]),
        ("hi", "hi"),
    ],
)  # fmt: skip
def test_sharegpt_and_openai_say_the_same(value, expected):
    assert read_conversation(value, {}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\nHuman: hi\n\nAssistant: Hello!", [ASKED, SAID]),
        ("\n\nHuman: hi\n\nAssistant:", [ASKED, {"role": "assistant", "content": ""}]),
        ("\n\nHuman: a\nb\n\nAssistant: Hello!", [{"role": "user", "content": "a\nb"}, SAID]),
    ],
)
def test_a_transcript_is_cut_at_its_marks(text, expected):
    assert read_conversation(text, HH) == expected


@pytest.mark.parametrize(
    ("value", "marks", "says"),
    [
        ([{"from": "martian", "value": "x"}], {}, "turn 1 is from str 'martian', which is none of assistant, chatgpt"),
        ([{"from": "human"}], {}, "turn 1 must have a text as content"),
        ([{"value": "x"}], {}, "turn 1 must be a mapping with a role"),
        ("no mark", HH, "does not begin with one of"),
        ("before \n\nHuman: hi", HH, "does not begin with one of"),
        (3, {}, "a prompt is a text or a list of turns"),
    ],
)
def test_what_is_no_conversation_is_refused(value, marks, says):
    with pytest.raises(ChatError, match=says):
        read_conversation(value, marks)


def test_sharegpt_files_are_known_by_their_column():
    conversations = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello!"}]
    row = row_of({"conversations": conversations, "system": "Be brief.", "id": "x"})
    assert row.prompt == [{"role": "system", "content": "Be brief."}, ASKED, SAID]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'conversations': turn 2 is from"):
        row_of({"conversations": [conversations[0], {"from": "bot", "value": "x"}]})


def test_alpaca_has_its_input_behind_the_instruction():
    row = row_of({"instruction": "Add.", "input": "2 3", "output": "5"})
    assert (row.prompt, row.completion) == ("Add.\n2 3", "5")
    assert row_of({"instruction": "Greet.", "input": "", "output": "Hi"}).prompt == "Greet."


def test_competition_problems_are_known_by_their_column():
    row = row_of({"problem": "1+1?", "answer": "2", "solution": "It is 2."})
    assert (row.prompt, row.answer, row.completion) == ("1+1?", "2", "It is 2.")
