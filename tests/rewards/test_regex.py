"""Responses and whether the expression is found."""

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.regex import Regex
from tests.rewards.samples import sample, value_of


@pytest.mark.parametrize(
    ("keys", "text", "score"),
    [
        ({"pattern": r"\d+"}, "I say 5", 1),
        ({"pattern": r"\d+"}, "five", 0),
        ({"pattern": r"\d+", "where": "start"}, "I say 5", 0),
        ({"pattern": r"\d+", "where": "whole"}, "5 then", 0),
        ({"pattern": r"\d+", "where": "whole"}, "55", 1),
        ({"pattern": "(?i)as an ai", "invert": True}, "As an AI, I cannot", 0),
        ({"pattern": "(?i)as an ai", "invert": True}, "Sure", 1),
        ({"pattern": "ü"}, "für", 1),
        ({"pattern": ""}, "", 1),
    ],
)
def test_an_expression_is_found_or_not(keys, text, score):
    assert value_of(Regex(num_workers=1, **keys), text) == score


def test_an_expression_that_never_ends_costs_its_time():
    reward = Regex(pattern="(a+)+b", timeout_seconds=0.5, num_workers=1)
    late, good = reward([sample("a" * 40), sample("aab")])
    assert (late.value, late.counts["timed_out"]) == (0.0, 1.0)
    assert (good.value, good.counts["timed_out"]) == (1.0, 0.0)


def test_keys_are_checked():
    with pytest.raises(ConfigError, match="it is no regular expression"):
        Regex(pattern="(")
    with pytest.raises(ConfigError, match="anywhere"):
        Regex(pattern="a", where="everywhere")
