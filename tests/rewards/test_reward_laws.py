"""What holds for every reward that reads text: cut, empty, foreign and very long responses."""

import math
import time

import pytest

from rlmodule.rewards.choice import Choice
from rlmodule.rewards.code import Code
from rlmodule.rewards.exact_match import ExactMatch
from rlmodule.rewards.format import Format
from rlmodule.rewards.math import Math
from rlmodule.rewards.numeric import Numeric
from rlmodule.rewards.reasoning_gym import ReasoningGym
from rlmodule.rewards.regex import Regex
from tests.rewards.samples import sample

GYM = {"metadata": {"source_dataset": "leg_counting"}}
REWARDS = {
    "exact_match": (ExactMatch, {}, "5", {}),
    "math": (Math, {"num_workers": 1}, "5", {}),
    "numeric": (Numeric, {}, "5", {}),
    "choice": (Choice, {}, "B", {}),
    "format": (Format, {}, "5", {}),
    "regex": (Regex, {"pattern": "^5$", "num_workers": 1}, "5", {}),
    "code": (Code, {"num_workers": 1, "fenced_only": True}, ["assert f() == 5"], {}),
    "reasoning_gym": (ReasoningGym, {"num_workers": 1}, "5", GYM),
}
HARD = [
    *("", " ", "\n", "\x00", "\ud800", "思考五", "🙂" * 1000, "x" * 100_000, "1" * 100_000, "1," * 50_000),
    *("\\boxed{" * 15_000, "\\boxed{1}" * 11_000, "$" * 100_000, "$1$" * 33_000, "\\(" * 50_000, "####" * 25_000),
    *(
        "#### 1\n" * 14_000,
        "answer is " * 10_000,
        "(A" * 50_000,
        "(A) " * 25_000,
        "**" * 50_000,
        "```python\n" * 10_000,
    ),
    *("<think>" * 14_000, "<answer>" * 12_000, "1/" * 50_000, "-" * 100_000, "\\frac{1}{" * 11_000, "{" * 100_000),
    *("answer: " + "A " * 50_000, "answer" + " " * 100_000, " is" * 33_000, "\\text{" * 16_000, "e1" * 50_000),
]


@pytest.fixture(scope="module", params=REWARDS)
def case(request):
    cls, keys, answer, columns = REWARDS[request.param]
    return cls, keys, answer, columns


@pytest.mark.parametrize("truncated", [0.0, -1.0, None])
def test_a_truncated_response_gets_the_score_set_for_it(case, truncated):
    cls, keys, answer, columns = case
    results = cls(truncated=truncated, **keys)(
        [sample("5", answer, finish_reason="length", **columns) for _ in range(2)]
    )
    assert [result.value for result in results] == [truncated, truncated]
    assert all(result.failure is None for result in results)


@pytest.mark.timeout(240)
def test_every_response_gets_a_finite_score_soon(case):
    cls, keys, answer, columns = case
    reward = cls(**keys)
    reward([sample("warm up", answer, **columns)])
    for text in HARD:
        before = time.monotonic()
        [result] = reward([sample(text, answer, **columns)])
        seconds = time.monotonic() - before
        assert result.value is not None, (text[:20], result.failure)
        assert math.isfinite(result.value)
        assert result.value == 0 or cls is ReasoningGym or text == "\\boxed{1}", text[:20]
        assert seconds < 5, (text[:20], seconds)


def test_no_responses_are_no_work(case):
    cls, keys, _, _ = case
    assert cls(**keys)([]) == []


@pytest.mark.parametrize(
    ("reward", "text", "answer"),
    [
        (Math(), r"so \boxed{ 1 / 2 }", "1/2"),
        (Math(), "nothing", None),
        (Numeric(), "1,000.50", "2001/2"),
        (Numeric(), "1000.5", "2001/2"),
        (Numeric(), "nothing", None),
        (Choice(), "The answer is (b)", "B"),
        (Choice(), "nothing", None),
    ],
)
def test_the_answer_of_a_response_can_be_voted_on(reward, text, answer):
    assert reward.answer_of(sample(text)) == answer
    assert reward.answer_of(sample(text, finish_reason="length")) is None
