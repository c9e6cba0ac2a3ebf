"""Responses and the letters that they choose; hard ones from public reports."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.choice import Choice
from tests.rewards.samples import value_of


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b", "B"),
        ("B. Paris", "B"),
        ("D) because it is", "D"),
        ("**C**", "C"),
        ("**C. Paris**", "C"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        ("<answer>B</answer>", "B"),
        ('{"answer": "B"}', "B"),
        ("The answer is:\n\nC", "C"),
        ("The best answer is A", "A"),
        ("The answer is (a)", "A"),
        ("Answer: A because it is", "A"),
        ("The correct answer is option C.", "C"),
        ("so the correct choice is **(B) 42**", "B"),
        ("Option A is wrong, option B is wrong.\nThe answer must be D", "D"),
        ("I think it's (A) or (B). Final: (B)", "B"),
        ("Therefore, B is right.", "B"),
        ("答案：Ｂ", "B"),
        ("答案是 C", "C"),
        # EleutherAI/lm-evaluation-harness#4188: the article is no choice
        ("b. 4", "B"),
        ("The answer is B because a car moves.", "B"),
        ("I would pick B — a safe choice.", "B"),
        ("The answer is a car", None),
        # jundot/omlx#3668: what is said after the answer
        ("The answer is B. Note that A is a common distractor.", "B"),
        ("ANSWER IS D. A is incorrect.", "D"),
        ("The answer is C because I computed the integral.", "C"),
        # openai/simple-evals#33: the A of a repeated "Antwort"
        ("Antwort:\n\nAntwort: C", "C"),
        # groq/openbench#348
        ("The calculated answer is 11.\n\nAnswer seems to be A.\n\nAnswer: A\n", "A"),
        # UKGovernmentBEIS/inspect_ai#5055
        ("ANSWER: **A**", "A"),
        ("ANSWER: $A$", "A"),
        # chigkim/Ollama-MMLU-Pro#6, TIGER-AI-Lab/MMLU-Pro#7
        ("answer: (D)", "D"),
        ("A perfect answer cannot be found.", None),
        ("Dog is not an answer for sure.", None),
        ("The answer is 'B'", "B"),
        ("The answer is A's", None),
        # NVIDIA-NeMo/Skills#1526
        ("Answer: E.\n\n\\boxed{(D)}", "D"),
        (r"\boxed{\Delta E} so Answer: B", "B"),
        ("A man walks. It is a dog.", None),
        ("The answer is not B", None),
        ("Answer: Apple", None),
        ("", None),
        ("x" * 100_000, None),
        ("answer " * 15_000 + ": B", "B"),
    ],
)
def test_the_letter_that_a_response_chooses(text, letter):
    assert Choice().chosen_letter(text) == letter
    assert value_of(Choice(), text, "B") == float(letter == "B")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("1", "B"),
        ("B, C", None),
        ("(A) and (C)", None),
        ("B, because", "B"),
        ("4", None),
        ("Paris", None),
    ],
)
def test_the_right_letter_of_a_row(answer, letter):
    assert Choice().right_letter(answer) == letter
    assert (Choice().missing_fields(answer, {}) is None) == (letter is not None)


def test_other_letters_and_several_right_ones():
    assert value_of(Choice(letters="ABCDEFGHIJ"), "The answer is J", "9") == 1
    assert value_of(Choice(), "C", ["B", "C"]) == 1
    assert "no answer" in (Choice().missing_fields(None, {}) or "")


@pytest.mark.parametrize("letters", ["A", "abcd", "AAB", "A-D", ""])
def test_letters_are_checked(letters):
    with pytest.raises(ConfigError, match="capital letters"):
        Choice(letters=letters)
