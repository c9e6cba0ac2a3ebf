"""A table of expressions and scores; the target is 8, the numbers are 3, 7 and 2."""

import pytest
import torch

from rlmodule.core.types import Prompt, Sample
from rlmodule.environments.countdown import Countdown as CountdownEnvironment
from rlmodule.rewards.countdown import Countdown


def sample(text, answer="8", meta=None, finish_reason="stop"):
    ids = torch.tensor([1])
    meta = {"numbers": [3, 7, 2]} if meta is None else meta
    prompt = Prompt(row=4, ids=(1,), text="p", answer=answer, source="countdown", meta=meta)
    return Sample(0, 0, prompt, ids, ids.bool(), finish_reason=finish_reason, text=text)


@pytest.mark.parametrize(
    ("text", "valid", "score"),
    [
        ("3+7-2", 1, 1),
        ("7-2+3", 1, 1),
        (" 7 + 3 - 2\n", 1, 1),
        ("3-2+7", 1, 1),
        ("3+7+2", 1, 0),  # 12
        ("2-3+7", 1, 0),  # 6
        ("8", 0, 0),  # the target itself
        ("7+3", 0, 0),
        ("3+7-2-0", 0, 0),
        ("3+3+2", 0, 0),  # 8, with a number twice and one not at all
        ("37-2", 0, 0),
        ("3 7-2", 0, 0),
        ("-2+3+7", 0, 0),  # no leading sign
        ("3+7--2", 0, 0),
        ("3+7-02", 0, 0),
        ("3+7-2=8", 0, 0),
        ("(3+7)-2", 0, 0),
        ("3+7-2\n3", 0, 0),
        ("3+7-2;", 0, 0),
        ("٣+7-2", 0, 0),  # a digit, but none of ours
        ("__import__('os')", 0, 0),
        ("9**9**9", 0, 0),
        ("9" * 10_000, 0, 0),
        ("", 0, 0),
    ],
)
def test_only_a_sum_of_the_numbers_that_hits_the_target_scores(text, valid, score):
    [result] = Countdown()([sample(text)])
    assert (result.value, result.diagnostics) == (score, {"valid": valid})
    assert result.parts == {}, "advantage estimators would take a component for the reward"


def test_a_number_given_twice_is_used_twice():
    meta = {"numbers": [4, 4, 1]}
    assert [result.value for result in Countdown()([sample("4+4-1", "7", meta), sample("4-1", "3", meta)])] == [1, 0]


def test_every_solution_of_the_environment_scores():
    rows = CountdownEnvironment(train_size=300).rows("train")
    samples = [sample(row["solution"], row["answer"], {"numbers": row["numbers"]}) for row in rows]
    assert {result.value for result in Countdown()(samples)} == {1.0}


@pytest.mark.parametrize("truncated", [0.0, None])
def test_a_truncated_response_gets_the_score_set_for_it(truncated):
    [result] = Countdown(truncated=truncated)([sample("3+7-2", finish_reason="length")])
    assert result.value == truncated


@pytest.mark.parametrize(("answer", "meta"), [(None, None), ("x", None), ("8", {}), ("8", {"numbers": 3})])
def test_a_row_without_numbers_or_target_lacks_them(answer, meta):
    prompt = sample("3+7-2", answer, meta).prompt
    assert f"found answer={answer!r}" in (Countdown().missing_fields(prompt.answer, prompt.meta) or "")


def test_a_row_of_the_environment_lacks_nothing():
    for row in CountdownEnvironment(train_size=30).rows("train"):
        assert Countdown().missing_fields(row["answer"], row) is None


def test_the_numbers_may_be_called_otherwise():
    [result] = Countdown(numbers_key="nums")([sample("3+7-2", "8", {"nums": ["3", "7", "2"]})])
    assert result.value == 1
