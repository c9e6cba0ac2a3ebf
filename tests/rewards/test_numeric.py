"""Responses, right numbers and scores."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.numeric import Numeric
from tests.rewards.samples import value_of


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("72", "72", 1),
        ("It is 72.", "72", 1),
        ("48 + 24 = 72", "72", 1),
        ("10-5", "5", 1),  # a minus behind a number is no sign
        ("it fell to -5", "-5", 1),
        ("it fell to −5", "-5", 1),
        ("-$5", "-5", 1),
        ("$1,234.50 in all", "1234.5", 1),
        ("1{,}234", "1234", 1),
        ("1,23,456", "123456", 0),
        ("3/4", "0.75", 1),
        (r"\boxed{\frac{3}{4}}", "0.75", 1),
        ("1.5e3", "1500", 1),
        ("1e999999", "5", 0),
        ("10kg", "10", 1),
        ("50%", "50", 1),
        ("0.1", "0.10", 1),
        ("29.00", "29", 1),
        ("100000000000000000001", "100000000000000000000", 0),  # equal as floats
        # EleutherAI/lm-evaluation-harness#3214, helm#4337, omlx#3484, opencompass#2426
        ("the total is $29.00.", "29", 1),
        ("The answer is 72, in total, so the farmer earns that much.", "72", 1),
        ("$200,000 - $130,000 = $70,000", "#### 70000", 1),
        # sgl-project/sglang#29933: the answer that is announced, not the last number of all
        ("The answer is 7. Next question: 9 apples", "7", 1),
        (r"\boxed{7} as 3 + 4", "7", 1),
        ("no number at all", "5", 0),
        ("", "5", 0),
        ("five", "5", 0),
        ("共５个", "5", 1),
        ("٥", "5", 0),
        ("x2", "2", 0),
        ("1/0", "1", 0),
        ("1 1/2", "1.5", 1),
        ("1 1/2", "0.5", 0),
        ("-2 3/4", "-2.75", 1),
        ("1½", "1.5", 1),
        (r"\boxed{3\frac{1}{2}}", "3.5", 1),
        (r"\boxed{3\frac{1}{2}}", "15.5", 0),
        (r"\boxed{5\text{ cm}^2}", "5", 1),
        ("5 m²", "5", 1),
        ("9", ["8", 9], 1),
    ],
)
def test_the_last_number_counts(text, answer, score):
    assert value_of(Numeric(), text, answer) == score


@pytest.mark.parametrize(
    ("keys", "text", "score"),
    [
        ({"tolerance": 0.01}, "3.15", 1),
        ({"tolerance": 0.01}, "3.16", 0),
        ({"relative_tolerance": 0.01}, "3.17", 1),
        ({"relative_tolerance": 0.01}, "3.18", 0),
        ({"tolerance": 0.5, "relative_tolerance": 0.01}, "3.6", 1),
    ],
)
def test_a_difference_may_be_allowed(keys, text, score):
    assert value_of(Numeric(**keys), text, "3.145") == score


def test_rows_without_a_number_are_refused():
    assert "it has no answer" in (Numeric().missing_fields(None, {}) or "")
    assert "finds no number in its answer 'many'" in (Numeric().missing_fields("many", {}) or "")
    assert Numeric().missing_fields("#### 1,000", {}) is None


def test_a_negative_tolerance_is_refused():
    with pytest.raises(ConfigError, match="at least 0"):
        Numeric(tolerance=-1)
