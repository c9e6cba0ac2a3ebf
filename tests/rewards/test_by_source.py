"""Rewards by data source: who scores what, what is refused before a run, and how a section becomes one."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from rlmodule.core.errors import ConfigError
from rlmodule.rewards.by_source import BySource
from rlmodule.rewards.exact_match import ExactMatch
from rlmodule.rewards.format import Format
from rlmodule.rewards.numeric import Numeric
from rlmodule.rewards.parts.composite import reward_of
from rlmodule.rewards.weighted import Weighted
from tests.rewards.samples import sample

MIXED = BySource({"numeric": Numeric(), "exact_match": ExactMatch()}, {"gsm8k": "numeric", "words": "exact_match"})


def of(source, text, answer):
    made = sample(text, answer)
    return replace(made, prompt=replace(made.prompt, source=source))


def test_each_row_is_scored_as_its_source_says():
    samples = [of("words", "yes", "yes"), of("gsm8k", "it is 5.0", "5"), of("words", "yes ...", "yes")]
    for order in ([0, 1, 2], [2, 0, 1]):
        results = MIXED([samples[i] for i in order])
        assert [result.value for result in results] == [[1.0, 1.0, 0.0][i] for i in order]
    numeric, word = MIXED([samples[1], samples[0]])
    assert ("answered" in numeric.diagnostics, "answered" in word.diagnostics) == (True, False)
    assert MIXED.answer_of(samples[1]) == Numeric().answer_of(samples[1])
    assert MIXED.answer_of(samples[2]) == "yes ..."


def test_a_source_without_a_reward():
    assert MIXED.missing_fields("5", {"source": "gsm8k"}) is None
    assert "finds no number" in (MIXED.missing_fields("many", {"source": "gsm8k"}) or "")
    assert "it is from 'mbpp', and reward.sources has a reward for gsm8k, words only" in (
        MIXED.missing_fields("5", {"source": "mbpp"}) or ""
    )
    [result] = MIXED([of("mbpp", "5", "5")])
    assert (result.value, result.failure) == (None, "sample 0: no reward for source 'mbpp'")
    assert replace(MIXED, otherwise="numeric")([of("mbpp", "5", "5")])[0].value == 1.0
    assert MIXED.answer_of(of("mbpp", "5", "5")) is None


def section(**keys):
    return OmegaConf.create({"name": "by_source", **keys})


def test_a_reward_without_a_section_has_its_defaults_and_a_section_may_be_a_sum():
    made = reward_of(
        section(
            sources={"a": "numeric", "b": "numeric+format", "c": "loose"},
            otherwise="exact_match",
            exact_match={"ignore_case": True},
            loose={"name": "numeric", "tolerance": 0.5},
        )
    )
    assert made == BySource(
        {
            "numeric": Numeric(),
            "numeric+format": Weighted({"numeric": Numeric(), "format": Format()}),
            "loose": Numeric(tolerance=0.5),
            "exact_match": ExactMatch(ignore_case=True),
        },
        {"a": "numeric", "b": "numeric+format", "c": "loose"},
        "exact_match",
    )
    assert made.knows_one_response


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "reward.sources={}: no data source has a reward. Set reward.sources={gsm8k:math,mbpp:code}"),
        ({"sources": {"a": "mth"}}, "reward.mth=mth: no reward has that name. Did you mean math"),
        ({"sources": {"a": "length"}}, "reward.length.start"),
        ({"sources": {"a": "math"}, "math": 5}, "reward.math=5: beside sources and otherwise"),
        ({"sources": {"a": ["math"]}}, "no reward has that name"),
        (
            {"sources": {"a": "math"}, "regex": {"pattern": "x"}},
            "reward.regex=a section: no data source has this reward",
        ),
    ],
)
def test_a_wrong_section_is_refused_with_its_full_key(keys, message):
    with pytest.raises(ConfigError) as caught:
        reward_of(section(**keys))
    assert message in str(caught.value)
