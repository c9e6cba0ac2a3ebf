"""The python tool: programs run apart, what they print is read, and nothing of one is left for the next."""

import pytest

from rlmodule.environments.parts.tool_calls import ToolCall
from rlmodule.environments.python import Python
from tests.environments.plays import play


@pytest.fixture(scope="module")
def made():
    return Python(train_size=12, test_size=2, tool_seconds=2.0, tool_characters=300)


def test_the_shown_programs_give_the_right_answers(made):
    seen = set()
    for row in made.rows("train"):
        if (kind := row["prompt"].split()[3]) in seen:
            continue  # one of each kind
        seen.add(kind)
        shown, end = play(made, row, [made.right_response(row), f"It is {row['answer']}."])
        assert shown == [f"{row['answer']}\n"]
        assert end.reward.value == 1.0
    assert seen == {"sum", "remainder", "greatest"}


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 3", ""),
        ("print('ü')", "ü\n"),
        ("print(1 / 0)", "ZeroDivisionError: division by zero\n"),
        ("print(", "SyntaxError"),
        ("while True: pass", "error: stopped after 2 seconds"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("import sys; sys.exit(3)", "error: the program ended with exit code 3"),
        ("print('a' * 10000)", "(9701 more characters)"),
        ("import os; print(sorted(os.listdir('.')))", "['program.py']"),
        ("import os; print([k for k in os.environ if 'PYTHON' in k])", "[]"),
    ],
)
def test_what_a_program_prints_is_shown(made, code, shown):
    result = made.toolbox.run(ToolCall("python", {"code": code}))
    assert shown in result.text
    assert not result.is_error, "a program that fails is a result to learn from"


def test_the_answer_is_the_last_number(made):
    [row] = made.rows("train")[:1]
    answer = row["answer"]
    right = (f"first 7, then {answer}", f"{answer}.", f"**{answer}.0**", f"{int(answer):,}")
    wrong = (f"{answer} or 7", "none", "", f"7.{answer}", f"{answer}.5", f"-{answer}")
    for text, value in (*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)):
        assert play(made, row, [text])[1].reward.value == value
