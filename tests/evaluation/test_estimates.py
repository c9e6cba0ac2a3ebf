"""pass@k, majority and intervals against what they estimate, computed the long way."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.evaluation.estimates import bootstrap_interval, majority_reward, pass_at_k, powers_of_two


@given(right=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(right, data):
    """Chen et al., arXiv:2107.03374: an unbiased estimate, since every subset of k answers is as likely."""
    k = data.draw(st.integers(1, len(right)))
    subsets = list(itertools.combinations(right, k))
    by_hand = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(by_hand, abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0, "two wrong ones are not among four with three right"
    assert pass_at_k(4, 1, 2) == 0.5, "three of six pairs"
    assert pass_at_k(200, 100, 100) == pytest.approx(1.0), "no binomial overflows"


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_k_doubles_up_to_n(most, expected):
    assert powers_of_two(most) == expected


def by_random_ties(answers, rewards):
    """Expected reward of a vote whose ties are broken at random, and within an answer by a random response of it."""
    votes = [answer for answer in answers if answer is not None]
    if not votes:
        return math.fsum(rewards) / len(rewards)
    most = max(votes.count(answer) for answer in votes)
    winners = sorted({answer for answer in votes if votes.count(answer) == most})
    of = {w: [r for a, r in zip(answers, rewards, strict=True) if a == w] for w in winners}
    return math.fsum(math.fsum(of[w]) / len(of[w]) for w in winners) / len(winners)


RESPONSES = st.lists(st.tuples(st.sampled_from(["3", "4", "5", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1)


@given(RESPONSES)
def test_majority_is_a_vote_with_ties_broken_at_random(responses):
    answers, rewards = zip(*responses, strict=True)
    assert majority_reward(answers, rewards) == pytest.approx(by_random_ties(answers, rewards), abs=1e-12)


@given(RESPONSES, st.randoms())
def test_majority_does_not_depend_on_the_order_of_responses(responses, random):
    shuffled = random.sample(responses, len(responses))
    assert majority_reward(*zip(*shuffled, strict=True)) == pytest.approx(
        majority_reward(*zip(*responses, strict=True)), abs=1e-12
    )


def test_majority_by_hand():
    assert majority_reward(["7", "7", "8"], [1.0, 1.0, 0.0]) == 1.0
    assert majority_reward(["7", "8"], [1.0, 0.0]) == 0.5, "a tie"
    assert majority_reward(["7", None, None], [1.0, 0.0, 0.0]) == 1.0, "no answer is no vote"
    assert majority_reward([None, None], [0.25, 0.75]) == 0.5, "nothing to vote for"


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(0, 3))
def test_an_interval_is_the_same_each_time_and_lies_within_the_values(values, seed):
    low, high = bootstrap_interval(values, seed)
    assert (low, high) == bootstrap_interval(values, seed)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9


def test_an_interval_of_a_coin_is_that_of_the_binomial_distribution():
    """400 prompts, half of them right: the normal approximation is 0.5 +- 1.96 * sqrt(0.25 / 400) = 0.5 +- 0.049."""
    low, high = bootstrap_interval([0.0, 1.0] * 200, 0)
    assert (low, high) == (pytest.approx(0.451, abs=0.005), pytest.approx(0.549, abs=0.005))


def test_an_interval_narrows_with_the_root_of_the_number_of_prompts():
    widths = [high - low for low, high in (bootstrap_interval([0.0, 1.0] * n, 0) for n in (50, 200, 800))]
    assert [widths[0] / widths[1], widths[1] / widths[2]] == [pytest.approx(2, rel=0.1)] * 2


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """A coin of 0.3 and 100 prompts, 200 times: 95 % of the intervals hold 0.3, give or take 3 standard errors."""
    coin = random.Random(0)
    hits = 0
    for seed in range(200):
        low, high = bootstrap_interval([float(coin.random() < 0.3) for _ in range(100)], seed)
        hits += low <= 0.3 <= high
    assert hits / 200 == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 200))


def test_without_values_there_is_no_interval_and_without_spread_it_is_empty():
    assert all(map(math.isnan, bootstrap_interval([], 0)))
    assert bootstrap_interval([0.25] * 4, 0) == (0.25, 0.25)
