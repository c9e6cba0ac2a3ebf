"""Public reports about data files, by their id in the list of cases: each row's right value."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmodule.core.errors import DataError
from rlmodule.core.text import as_text
from rlmodule.data.config import DataConfig
from rlmodule.data.demonstrations import DemonstrationSource, file_demonstrations
from rlmodule.data.preferences import PreferenceSource, file_preferences
from rlmodule.data.prompts import load_prompts
from rlmodule.models.byte_tokenizer import byte_tokenizer
from tests.data.templates import OPENS_THINKING, RETURN, THINKS_LAST, turn, with_template

BYTES = byte_tokenizer()
PLAIN = with_template(
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}}}},
]


@pytest.fixture
def lines(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def parquet(tmp_path):
    def write(table, name="rows.parquet"):
        pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), tmp_path / name)
        return str(tmp_path / name)

    return write


def demonstrated(path, tokenizer=PLAIN, **keys):
    """(prompt, response) of each row as text."""
    samples = file_demonstrations(DataConfig(train_files=[path], **keys), tokenizer, "train")
    return [(tokenizer.decode(list(s.prompt.ids)), tokenizer.decode(s.response_ids.tolist())) for s in samples]


def prompted(path, tokenizer=PLAIN, **keys):
    return list(load_prompts(DataConfig(train_files=[path], **keys), tokenizer, "train"))


def paired(path, tokenizer=PLAIN, **keys):
    pairs = file_preferences(DataConfig(train_files=[path], **keys), tokenizer, "train")
    return [
        (tokenizer.decode(list(p.chosen.prompt.ids)), *(tokenizer.decode(s.response_ids.tolist()) for s in p.samples))
        for p in pairs
    ]


# ---- words for the model that stand in columns of their own


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Name a colour.", "input": "", "output": "blue"}, "<|user|>Name a colour."),
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "<|user|>Add.\n1 and 2"),
        ({"instruction": "", "input": "1 and 2", "output": "3"}, "<|user|>1 and 2"),
        ({"instruction": "Add.", "input": None, "output": "3"}, "<|user|>Add."),
        ({"instruction": "Why?", "context": "It rains.", "response": "So."}, "<|user|>Why?\nIt rains."),  # Dolly
        ({"instruction": "Go.", "input": "", "output": "x", "system": "S"}, "<|system|>S<|user|>Go."),
    ],
)
def test_t2b_03_the_instruction_is_in_the_prompt(lines, row, prompt):
    """T2B-03."""
    [(got, said)] = demonstrated(lines(row))
    assert got == prompt + "<|assistant|>"
    assert said == (row.get("output") or row["response"]) + "<|end|>"


def test_t2b_03_a_prompt_column_wins_over_an_instruction(lines):
    """T2B-03: and the plan says that the other is not read."""
    path = lines({"prompt": "p", "instruction": "i", "completion": "c"})
    assert demonstrated(path) == [("<|user|>p<|assistant|>", "c<|end|>")]
    source = DemonstrationSource(DataConfig(train_files=[path]), "train")
    assert source.describe_columns() == "prompt = prompt, completion = completion; not read: instruction"


@pytest.mark.parametrize("column", ["question", "prompt", "query", "instruction"])
def test_t2b_05_the_question_of_a_pair_is_its_prompt(lines, column):
    """T2B-05: whatever the responses have in common."""
    rows = [
        {"system": "S", column: "Name a colour of the sky.", "chosen": a, "rejected": b}
        for a, b in (("The sky is blue", "The sky is red"), ("blue", "red"))
    ]
    prompt = "<|system|>S<|user|>Name a colour of the sky.<|assistant|>"
    assert paired(lines(*rows)) == [
        (prompt, "The sky is blue<|end|>", "The sky is red<|end|>"),
        (prompt, "blue<|end|>", "red<|end|>"),
    ]


def test_t2b_05_a_prompt_that_is_not_recognised_is_said(lines):
    """T2B-05: the row that cannot be used names the key, the one that can is said in the plan."""
    path = lines({"ask": "Name one.", "chosen": "It is blue", "rejected": "It is red"})
    [(prompt, *_)] = paired(path)
    assert prompt == "<|user|>It is<|assistant|>"
    source = PreferenceSource(DataConfig(train_files=[path]), "train")
    assert (
        source.describe_columns()
        == "chosen = chosen, rejected = rejected, prompt = what both begin with; not read: ask"
    )
    with pytest.raises(DataError, match=r"the columns are ask, chosen, rejected\. Set data\.prompt_key"):
        paired(lines({"ask": "Name one.", "chosen": "blue", "rejected": "red"}))
    [(prompt, *_)] = paired(path, prompt_key="ask")
    assert prompt == "<|user|>Name one.<|assistant|>"


def test_t2b_05_messages_are_the_prompt_unless_they_hold_the_answer(lines):
    """T2B-05: ultrafeedback_binarized has the whole conversation under that name."""
    question, good, bad = turn("user", "q"), turn("assistant", "yes"), turn("assistant", "no")
    rows = [
        {"messages": [question], "chosen": "yes", "rejected": "no"},
        {"messages": [question, good], "chosen": [question, good], "rejected": [question, bad]},
    ]
    assert paired(lines(*rows)) == [("<|user|>q<|assistant|>", "yes<|end|>", "no<|end|>")] * 2


def test_t2b_38_a_system_column_is_a_system_turn(lines):
    """T2B-38."""
    rows = [
        {"system": "Speak French.", "prompt": "Hi"},
        {"system": "Speak French.", "prompt": [turn("user", "Hi")]},
        {"system": "Speak French.", "prompt": [turn("system", "Speak French."), turn("user", "Hi")]},
        {"system": "", "prompt": "Hi"},
        {"prompt": "Hi"},
    ]
    texts = [PLAIN.decode(list(prompt.ids)) for prompt in prompted(lines(*rows), system_prompt="Be brief.")]
    assert texts[:3] == ["<|system|>Speak French.<|user|>Hi<|assistant|>"] * 3
    assert texts[3:] == ["<|system|>Be brief.<|user|>Hi<|assistant|>"] * 2
    [left_out, *_] = prompted(lines(*rows), system_key=None)
    assert PLAIN.decode(list(left_out.ids)) == "<|user|>Hi<|assistant|>"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"system": "A", "prompt": [turn("system", "B"), turn("user", "q")]}, "begins with another system turn"),
        ({"system": 5, "prompt": "q"}, "which is no text"),
    ],
)
def test_t2b_38_two_system_turns_are_refused(lines, row, says):
    """T2B-38."""
    with pytest.raises(DataError, match=says) as caught:
        prompted(lines({"prompt": "x"}, row))
    assert caught.value.location.endswith("rows.jsonl:2")
    assert "data.system_key=null" in caught.value.fix


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]])
def test_t2b_08_a_tools_column_reaches_the_template(lines, tools):
    """T2B-08: for demonstrations, pairs and prompts to respond to."""
    tokenizer = with_template(THINKS_LAST)
    messages = [turn("user", "q"), turn("assistant", "a")]
    expected = tokenizer.apply_chat_template(messages[:1], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert '"name": "say"' in expected
    [(shown, _)] = demonstrated(lines({"messages": messages, "tools": tools}), tokenizer)
    [(compared, *_)] = paired(lines({"prompt": "q", "chosen": "a", "rejected": "b", "tools": tools}), tokenizer)
    [asked] = prompted(lines({"prompt": "q", "tools": tools}), tokenizer)
    assert shown == compared == tokenizer.decode(list(asked.ids)) == expected
    [without] = prompted(lines({"prompt": "q", "tools": tools}), tokenizer, tools_key=None)
    assert '"name"' not in tokenizer.decode(list(without.ids))


def test_t2b_08_a_template_that_writes_no_tools_is_said(lines):
    """T2B-08."""
    config = DataConfig(train_files=[lines({"prompt": "q", "tools": TOOLS, "level": 3})])
    table = load_prompts(config, with_template(RETURN), "train")
    said = "prompt = prompt, tools = tools; for the reward alone: level"
    assert table.describe_columns() == f"{said} (the chat template does not write tools)"
    assert load_prompts(config, with_template(THINKS_LAST), "train").describe_columns() == said


def test_t2b_08_tools_that_are_none_are_refused(lines):
    """T2B-08."""
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'tools': .*data\.tools_key=null"):
        prompted(lines({"prompt": "q", "tools": "calculator"}))


def test_turns_of_a_prompt_before_a_completion_are_not_trained(lines):
    """Issue 10, point 3."""
    prompt = [turn("user", "q"), turn("assistant", "a"), turn("user", "r")]
    rows = [{"prompt": prompt, "completion": "b"}, {"prompt": prompt, "completion": [turn("assistant", "b")]}]
    expected = ("<|user|>q<|assistant|>a<|end|><|user|>r<|assistant|>", "b<|end|>")
    assert demonstrated(lines(*rows)) == [expected] * 2


def test_a_completion_that_repeats_its_prompt_is_shown_once(lines):
    """As pairs are published, whose chosen responses a warm start imitates."""
    question, answer = turn("user", "q"), turn("assistant", "a")
    rows = [{"prompt": "q", "chosen": [question, answer]}, {"prompt": [question], "chosen": [answer]}]
    assert demonstrated(lines(*rows), completion_key="chosen") == [("<|user|>q<|assistant|>", "a<|end|>")] * 2


def test_earlier_turns_that_lose_their_reasoning_are_said(lines):
    """Issue 10, point 3."""
    messages = [turn("user", "q"), turn("assistant", "<think>x</think>a"), turn("user", "r"), turn("assistant", "b")]
    config = DataConfig(train_files=[lines({"messages": messages}, {"messages": messages[2:]})])
    source = DemonstrationSource(config, "train")
    source.samples(with_template(THINKS_LAST))
    assert source.describe_columns().endswith(
        "; 1 earlier turns are not trained, for the chat template drops their reasoning"
    )


# ---- nulls, numbers and texts


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [
    turn("user", "q"),
    turn("assistant", None, tool_calls=[call("add", a=1)]),
    turn("tool", "2"),
    turn("assistant", None, tool_calls=[call("say", text="x"), call("add", a=2)]),
    turn("tool", "y"),
    turn("assistant", "done"),
]


def test_t2b_21_tool_calls_say_in_parquet_what_they_say_in_json_lines(lines, parquet):
    """T2B-21, issue 10 point 8: what Arrow fills in at any depth never reaches the template."""
    tokenizer = with_template(THINKS_LAST)
    rows = [{"messages": CALLS, "tools": TOOLS}, {"messages": [turn("user", "q"), turn("assistant", "a")]}]
    of_lines = demonstrated(lines(*rows), tokenizer)
    of_parquet = demonstrated(parquet(rows), tokenizer)
    assert pq.read_table(parquet(rows)).to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "a": 1,
        "text": None,
    }
    assert of_parquet == of_lines
    assert '"arguments": {"a": 1}}' in of_lines[0][1]
    assert "null" not in of_lines[0][0] + of_lines[0][1]


def test_nulls_that_arrow_fills_in_never_reach_the_reward(lines, parquet):
    """Issue 10, point 8."""
    rows = [
        {"prompt": "p", "data_source": "s", "reward_model": {"ground_truth": "1"}, "extra_info": {"a": 1}},
        {
            "prompt": "p",
            "data_source": "s",
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"b": [{"c": 1}, {"d": 2}]},
        },
    ]
    metas = [[prompt.meta for prompt in prompted(path)] for path in (lines(*rows), parquet(rows))]
    assert metas[0] == metas[1]
    assert metas[1][1]["b"] == [{"c": 1}, {"d": 2}]


def column(values, kind=None):
    return pa.table({"prompt": ["p"] * len(values), "answer": pa.array(values, kind)})


@pytest.mark.parametrize(
    ("table", "answers"),
    [
        (column([Decimal(72)], pa.decimal128(10, 0)), ["72"]),
        (column([Decimal("72.00"), Decimal("0.50")], pa.decimal128(10, 2)), ["72", "0.5"]),
        (column([Decimal("12345678901234567.25")], pa.decimal128(30, 2)), ["12345678901234567.25"]),
        (column([72.0, None], pa.float64()), ["72", None]),
        (column([0.1, 3.0], pa.float32()), ["0.1", "3"]),
        (column([72, -3], pa.int16()), ["72", "-3"]),
        (column([float("nan")], pa.float64()), [None]),
        (column([True]), ["true"]),
        (column([b"72"], pa.binary()), ["72"]),
        (column([["a", "b"]]), ['["a", "b"]']),
        (column([[]], pa.list_(pa.string())), [None]),
        (column(["72"]).set_column(1, "answer", pa.array(["72"]).dictionary_encode()), ["72"]),
        (
            column([{"x": Decimal(1), "y": None}], pa.struct([("x", pa.decimal128(3, 0)), ("y", pa.int8())])),
            ['{"x": 1}'],
        ),
        (column([[("k", 1)]], pa.map_(pa.string(), pa.int64())), ['{"k": 1}']),
    ],
)
def test_t2b_22_and_24_numbers_of_typed_columns_are_written_as_numbers(parquet, table, answers):
    """T2B-22 (decimals), T2B-24 (whole numbers with a gap, which pandas turns into floats)."""
    assert [prompt.answer for prompt in prompted(parquet(table))] == answers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.0, "72"),
        (0.5, "0.5"),
        (1e300, "1e+300"),
        (-0.0, "0"),
        (10**30, str(10**30)),
        (float("nan"), None),
        ("x", "x"),
    ],
)
def test_t2b_24_numbers_of_json(value, text):
    """T2B-24."""
    assert as_text(value) == text


def test_t2b_25_several_right_answers_reach_the_reward_as_a_list(lines, parquet):
    """T2B-25."""
    rows = [{"prompt": "q", "answer": ["", "none"]}]
    for path in (lines(*rows), parquet(rows)):
        [prompt] = prompted(path)
        assert (prompt.answer, prompt.answer_value) == ('["", "none"]', ["", "none"])


def test_t2b_12_the_column_that_was_chosen_is_the_answer(lines):
    """T2B-12."""
    row = {
        "prompt": "p",
        "data_source": "s",
        "reward_model": {"ground_truth": "9"},
        "extra_info": {"answer": "7"},
    }
    [own] = prompted(lines(row))
    [chosen] = prompted(lines(row), answer_key="extra_info.answer")
    assert (own.answer, own.answer_value, chosen.answer, chosen.answer_value) == ("9", "9", "7", "7")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Human: 7+7?\n\nAssistant: 14", "Human: 7+7?\n\nAssistant: 15", "Human: 7+7?\n\nAssistant:", (" 14", " 15")),
        ("Q: how many? 14", "Q: how many? 145", "Q: how many?", (" 14", " 145")),
        ("A:\n14 b", "A:\n15 b", "A:\n", ("14 b", "15 b")),
        ("pi is 3.14", "pi is 3.15", "pi is", (" 3.14", " 3.15")),
        ("天空是蓝色", "天空是红色", "天空是", ("蓝色", "红色")),
    ],
)
def test_t2b_10_an_implicit_prompt_ends_before_the_first_word_that_differs(lines, chosen, rejected, prompt, answers):
    """T2B-10."""
    rows = lines({"chosen": chosen, "rejected": rejected})
    [(got, good, bad)] = paired(rows, BYTES, apply_chat_template=False)
    assert (got, good, bad) == (prompt, answers[0] + "<|e|>", answers[1] + "<|e|>")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("row", [{"prompt": "q", "answer": "\ud83d"}, {"prompt": "q", "extra": {"a": ["\udc00"]}}])
def test_t2b_18_half_of_a_surrogate_pair_is_refused_where_it_stands(tmp_path, name, row):
    """T2B-18: no log could write it."""
    rows = [{"prompt": "whole \U0001f600"}, row]
    path = tmp_path / name
    path.write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="half of a surrogate pair") as caught:
        prompted(str(path))
    assert caught.value.location == f"{path}:2"


def test_t2b_18_also_in_json_inside_a_column(parquet):
    """T2B-18."""
    with pytest.raises(DataError, match=r"rows\.parquet:1: column 'meta' is not JSON: .*half of a surrogate pair"):
        prompted(parquet([{"prompt": "q", "meta": '{"a": "\\ud83d"}'}]))


# ---- words that lead the right way


def test_t2b_19_turns_without_a_template_are_refused(lines):
    """T2B-19: as prompts to respond to are; also where the tokenizer has a template that would be used."""
    messages = [turn("user", "q"), turn("assistant", "a")]
    for row in (
        {"messages": messages},
        {"prompt": "q", "completion": messages[1:]},
        {"prompt": messages[:1], "completion": "a"},
    ):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: a list of turns needs a chat template"):
            demonstrated(lines(row), apply_chat_template=False)


def test_t2b_38_a_system_column_for_raw_text_names_the_key(lines):
    """T2B-38."""
    path = lines({"system": "S", "prompt": "q", "completion": "a"})
    with pytest.raises(DataError, match=r"left out by data\.system_key=null"):
        prompted(path, apply_chat_template=False)
    [(prompt, _)] = demonstrated(path, apply_chat_template=False, system_key=None)
    assert prompt == "q"


def test_t2b_32_a_file_without_responses_names_the_key(lines):
    """T2B-32: GSM8K as it is published."""
    path = lines({"question": "1+1?", "answer": "2"})
    with pytest.raises(DataError, match=r"no completion column.* are question, answer\. Set data\.completion_key"):
        demonstrated(path)
    assert demonstrated(path, completion_key="answer") == [("<|user|>1+1?<|assistant|>", "2<|end|>")]


def test_t2b_34_pairs_with_reasoning_share_one_prompt(lines):
    """T2B-34: and a pair of which only one response has reasoning is refused."""
    tokenizer = with_template(OPENS_THINKING)
    good, bad = "<think>easy</think>4", "<think>hard</think>5"
    assert paired(lines({"prompt": "q", "chosen": good, "rejected": bad}), tokenizer) == [
        ("<|user|>q<|assistant|><think>\n", "easy</think>4<|end|>", "hard</think>5<|end|>")
    ]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template writes the prompt in two ways"):
        paired(lines({"prompt": "q", "chosen": good, "rejected": "5"}), tokenizer)


def test_a_raw_prompt_without_a_character_is_refused(lines):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt is empty"):
        demonstrated(
            lines({"prompt": "q", "completion": "a"}, {"prompt": "", "completion": "b"}), apply_chat_template=False
        )


@pytest.mark.parametrize("column", ["images", "image", "video", "audio"])
@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_rows_with_images_are_refused_and_empty_columns_are_not(tmp_path, column, algorithm):
    """As verl's geometry3k and LLaVA's files have them: the text alone would be trained on."""
    row = {"prompt": "What is it?", "answer": "a cat", "completion": "a cat", "chosen": "a cat", "rejected": "a"}
    read = {
        "grpo": lambda config: load_prompts(config, PLAIN, "train"),
        "sft": lambda config: file_demonstrations(config, PLAIN, "train"),
        "dpo": lambda config: file_preferences(config, PLAIN, "train"),
    }[algorithm]
    path = tmp_path / "rows.jsonl"
    for empty in (None, [], "", "registry/container:1"):
        path.write_text(json.dumps({**row, column: empty}) + "\n")
        assert len(read(DataConfig(train_files=[str(path)]))) == 1
    for second in ({column: ["cat.png"]}, {column: "cat.png", "prompt": f"<{column.removesuffix('s')}>\nWhat is it?"}):
        path.write_text("".join(json.dumps({**row, **more}) + "\n" for more in ({}, second)))
        with pytest.raises(DataError, match=rf"rows\.jsonl:2: the row has something under '{column}'.*nothing but"):
            read(DataConfig(train_files=[str(path)]))
