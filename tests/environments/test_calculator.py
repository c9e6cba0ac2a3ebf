"""The calculator: a call gives its result, and the last response without a call is the answer."""

from collections import Counter

import pytest

from rlmodule.environments.calculator import Calculator
from rlmodule.environments.parts.arithmetic import calc
from tests.environments.plays import play, prompt_of, said

MADE = Calculator(train_size=40, test_size=8)


@pytest.mark.parametrize("name", ["pythonic", "hermes", "qwen_xml", "llama_json", "mistral"])
def test_the_right_call_and_its_result_earn_the_reward(name):
    made = Calculator(train_size=4, test_size=1, tool_format=name)
    for row in made.rows("train"):
        shown, end = play(made, row, [made.right_response(row), row["answer"]])
        assert shown == [row["answer"]]
        assert (end.reward.value, end.diagnostics) == (1.0, {"tool_calls": 1.0, "tool_errors": 0.0})


def test_rows_describe_the_tool_and_say_what_is_asked():
    for row in MADE.rows("train"):
        first, word, second = row["prompt"].split()
        assert {"plus": "+", "minus": "-", "times": "*"}[word].join((first, second)) == row["expression"]
        assert int(row["answer"]) == eval(row["expression"])  # our own text, two numbers
        assert [tool["function"]["name"] for tool in row["tools"]] == ["calc"]


def test_wrong_and_malformed_calls_are_answered_and_cost_nothing_but_the_turn():
    row = MADE.rows("train")[0]
    shown, end = play(
        MADE, row, ["[calc(", "[calc(x=\"os.system('ls')\")]", "[sum(a=1)]", '[calc(x="1/0")]', row["answer"]]
    )
    assert all(text.startswith("error: ") for text in shown)
    assert "ZeroDivisionError" in shown[3]
    assert (end.reward.value, end.diagnostics) == (1.0, {"tool_calls": 4.0, "tool_errors": 4.0})
    _, end = play(MADE, row, [f"{row['answer']}0"])
    assert (end.reward.value, end.diagnostics["tool_calls"]) == (0.0, 0.0)


def test_several_results_are_a_turn_each_of_a_tool_and_one_of_a_user():
    """There are templates that refuse two turns of a user in a row (Gemma); what a tool says has an id."""
    row, call = MADE.rows("train")[0], '[calc(x="1+1"), calc(x="2+2")]'
    for role, shown in (("tool", ["2", "4"]), ("user", ["2\n4"])):
        made = Calculator(train_size=40, test_size=8, observation_role=role)
        reply = made.start(prompt_of(row)).reply(said(call))
        assert [(m["role"], m["content"]) for m in reply.messages] == [(role, text) for text in shown]


def test_an_episode_that_is_cut_in_a_call_is_worth_nothing():
    row = MADE.rows("train")[0]
    end = MADE.start(prompt_of(row)).reply(said('[calc(x="1', "length"))
    assert end.reward.value == 0.0


def test_demonstrations_call_in_four_of_five_cases_and_rightly_in_a_quarter_of_these():
    """In the format that the model's template speaks; what the tool returns is passed on."""
    made = MADE.for_template("{{ '<tool_call>' }}")
    assert made.tool_format == "hermes"
    assert made.for_template("[TOOL_CALLS]") == made, "settled once"
    kinds = Counter()
    for prompt, shown in made.demonstrations(800, seed=0):
        first, word, second = prompt.split()
        right = str(eval(first + {"plus": "+", "minus": "-", "times": "*"}[word] + second))
        if isinstance(shown, str):
            kinds["at once"] += 1
            assert shown != right
            continue
        call, result, answer = (turn["content"] for turn in shown)
        assert call.startswith("<tool_call>")
        assert result == answer
        kinds["right" if made.right_response(_row(prompt, right)) == call else "other"] += 1
    assert kinds["at once"] == 160
    assert kinds["right"] == 160
    assert sum(kinds.values()) == 800


def _row(prompt, answer):
    first, word, second = prompt.split()
    return {"expression": first + {"plus": "+", "minus": "-", "times": "*"}[word] + second, "answer": answer}


@pytest.mark.parametrize(
    ("expression", "value"), [("2*(3+4)", "14"), ("7//2", "3"), ("-3-4", "-7"), ("7/2", "3.5"), (" 7 % 4 ", "3")]
)
def test_the_tool_knows_numbers_signs_and_parentheses(expression, value):
    assert calc(expression) == value


@pytest.mark.parametrize("expression", ["2**9999", "a", "f(1)", "", "1 < 2", "'a'*3", "True"])
def test_the_tool_refuses_everything_else(expression):
    with pytest.raises((ValueError, SyntaxError)):
        calc(expression)
