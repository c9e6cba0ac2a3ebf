"""A table of responses and scores."""

import json

import pytest
import torch

from rlmodule.core.types import Prompt, Sample
from rlmodule.rewards.exact_match import ExactMatch


def sample(text, answer="0123", finish_reason="stop", answer_value=None):
    ids = torch.tensor([1])
    prompt = Prompt(row=4, ids=(1,), text="p", answer=answer, source="sort", answer_value=answer_value)
    return Sample(0, 0, prompt, ids, ids.bool(), finish_reason=finish_reason, text=text)


@pytest.mark.parametrize(
    ("keys", "text", "answer", "score"),
    [
        ({}, "0123", "0123", 1.0),
        ({}, " 0123\n", "0123", 1.0),
        ({}, "0123", "0123 ", 1.0),
        ({"strip": False}, " 0123", "0123", 0.0),
        ({}, "01 23", "0123", 0.0),
        ({}, "01234", "0123", 0.0),
        ({}, "", "0123", 0.0),
        ({}, "", "", 1.0),
        ({}, "Yes", "yes", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
    ],
)
def test_a_response_scores_one_when_it_is_the_answer(keys, text, answer, score):
    assert [result.value for result in ExactMatch(**keys)([sample(text, answer)])] == [score]


@pytest.mark.parametrize("truncated", [0.0, -1.0, None])
def test_a_truncated_response_gets_the_score_set_for_it(truncated):
    cut, whole = ExactMatch(truncated=truncated)([sample("0123", finish_reason="length"), sample("0123")])
    assert (cut.value, whole.value) == (truncated, 1.0)


def test_a_row_without_an_answer_lacks_it():
    assert "it has no answer" in (ExactMatch().missing_fields(None, {}) or "")
    assert ExactMatch().missing_fields("", {}) is None


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("", ["", "none"], 1.0),
        ("none", ["", "none"], 1.0),
        ('["", "none"]', ["", "none"], 0.0),
        ("72", [72.0, "seventy-two"], 1.0),
        ("b", ["a", None, "c"], 0.0),
        ('[{"a": 1}]', [{"a": 1}], 1.0),  # no list of answers, so the answer is its JSON
    ],
)
def test_t2b_25_one_of_several_right_answers_is_enough(text, answers, score):
    """T2B-25."""
    [result] = ExactMatch()([sample(text, answer=json.dumps(answers), answer_value=answers)])
    assert result.value == score


def test_the_answer_in_a_response_is_the_response_unless_it_was_cut():
    reward = ExactMatch(ignore_case=True)
    assert reward.answer_of(sample("Yes ")) == "yes"
    assert reward.answer_of(sample("Yes", finish_reason="length")) is None
