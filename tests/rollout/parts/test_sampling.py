"""Random numbers are a function of (seed, sample, position), and draws follow the distribution they are given.

Settings that no engine could obey are refused.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.errors import ConfigError
from rlmodule.ops.random import uniform_of_token
from rlmodule.rollout.parts.sampling import Distribution, SamplingConfig, Truncation

LARGEST = 1 - 2.0**-53  # the largest number below 1


def draw(logits, uniform):
    return Distribution.of(logits.clone()).tokens_at(uniform)


def logprob_of(logits, tokens):
    return Distribution.of(logits.clone()).logprob_of(tokens)


def numbers(seed, samples, position):
    samples = torch.tensor(samples)
    return uniform_of_token(torch.full_like(samples, seed), samples, torch.full_like(samples, position))


def test_a_number_depends_on_its_key_alone_and_not_on_its_neighbours():
    together = numbers(3, list(range(100)), 5)
    alone = [numbers(3, [i], 5)[0] for i in range(100)]
    assert together.tolist() == alone
    assert numbers(3, list(range(100))[::-1], 5).tolist() == alone[::-1]


def test_seed_sample_and_position_all_matter():
    numbers_of_keys = {
        float(numbers(seed, [sample], position)[0])
        for seed in (0, 1, 2**31)
        for sample in (0, 1, 10**12)
        for position in (0, 1, 2)
    }
    assert len(numbers_of_keys) == 27


WORD = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


def splitmix(x):
    """The finaliser of splitmix64 on whole numbers, as its authors print it."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize("key", [(0, 0, 0), (3, 10**12, 7), (2**62, -3, 511)])
def test_numbers_are_those_of_splitmix64(key):
    """A changed formula would change every run that is resumed or repeated."""
    seed, sample, position = key
    word = splitmix((seed * STEP + 1) & WORD)
    word = splitmix(word ^ (sample * STEP & WORD))
    word = splitmix((word + (position + 1) * STEP) & WORD)
    assert numbers(seed, [sample], position)[0] == (word >> 11) / 2**53


@given(st.integers(0, 2**62), st.integers(-5, 2**62), st.integers(0, 10**6))
def test_numbers_lie_between_0_and_1(seed, sample, position):
    [number] = numbers(seed, [sample], position)
    assert 0 <= number < 1


def test_numbers_are_spread_evenly_and_unrelated():
    """Over 200,000 numbers: moments, ten equal bins, and neighbours in sample id and in position; five sigma."""
    grid = np.stack([numbers(0, list(range(20_000)), position).numpy() for position in range(10)])
    flat = grid.ravel()
    sigma = 1 / math.sqrt(12 * flat.size)
    assert abs(flat.mean() - 0.5) < 5 * sigma
    counts = np.bincount((flat * 10).astype(int), minlength=10)
    assert np.abs(counts - flat.size / 10).max() < 5 * math.sqrt(flat.size * 0.09)
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(a.size)


def test_draw_inverts_the_cumulative_distribution():
    """Probabilities 1/8, 1/2, 3/8: tokens change at 0.125 and 0.625."""
    logits = torch.tensor([0.125, 0.5, 0.375]).log()
    points = torch.tensor([0.0, 0.124, 0.126, 0.624, 0.626, LARGEST], dtype=torch.float64)
    assert draw(logits.expand(6, 3), points).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("vocabulary", [3, 64, 50_000])
def test_a_token_of_probability_0_is_never_drawn(vocabulary):
    """Also at the ends, where rounding of the cumulative sum could reach it."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(64, vocabulary, generator=rng) * 5
    logits[:, 0] = logits[:, -1] = -torch.inf
    for point in (0.0, 1e-300, 0.5, LARGEST):
        drawn = draw(logits, torch.full((64,), point, dtype=torch.float64))
        assert bool(logits.gather(-1, drawn[:, None]).isfinite().all()), point


@given(st.integers(1, 400), st.integers(0, 2**31), st.floats(0, LARGEST))
def test_a_draw_is_that_of_the_plain_cumulative_sum(vocabulary, seed, point):
    """Blocks are only a way to find it: the token is the first whose cumulative probability is above the number."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocabulary, generator=rng) * 4
    logits[torch.rand(3, vocabulary, generator=rng) < 0.3] = -torch.inf
    logits[:, seed % vocabulary] = 0.0
    weights = (logits - logits.amax(-1, keepdim=True)).exp().double()
    cumulative = weights.cumsum(-1)
    uniform = torch.full((3,), point, dtype=torch.float64)
    drawn = draw(logits, uniform)
    above = cumulative.gather(1, drawn[:, None])[:, 0] / cumulative[:, -1]
    below = above - weights.gather(1, drawn[:, None])[:, 0] / cumulative[:, -1]
    assert bool((below - 1e-12 <= uniform).all()) and bool((uniform <= above + 1e-12).all())
    torch.testing.assert_close(
        logprob_of(logits, drawn), logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0], rtol=0, atol=2e-6
    )


def test_draws_follow_the_distribution():
    """Over 20,000 samples every token's share is within five sigma of its probability."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 20_000
    drawn = draw(logits.expand(count, 5), numbers(7, list(range(count)), 0))
    share = torch.bincount(drawn, minlength=5) / count
    probability = logits.softmax(-1)
    sigma = (probability * (1 - probability) / count).sqrt()
    assert bool(((share - probability).abs() < 5 * sigma).all())


LOGITS = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(), [0, 1, 2, 3]),
        (Truncation(top_k=2), [1, 3]),
        (Truncation(top_k=4), [0, 1, 2, 3]),
        (Truncation(top_k=9), [0, 1, 2, 3]),
        (Truncation(top_p=0.5), [1]),  # 0.5 is reached by the first
        (Truncation(top_p=0.51), [1, 3]),
        (Truncation(top_p=0.8), [1, 2, 3]),
        (Truncation(top_p=1e-9), [1]),  # the likeliest always stays
        (Truncation(top_k=3, top_p=0.6), [1, 3]),  # of the three: 0.56, 0.28, 0.17
        (Truncation(top_k=2, top_p=0.6), [1]),  # of the two: 0.67, 0.33
    ],
)
def test_truncation_keeps_the_likeliest(truncation, kept):
    out = truncation(LOGITS)
    assert out.isfinite()[0].nonzero().flatten().tolist() == kept
    assert torch.equal(out[0, kept], LOGITS[0, kept])
    assert truncation.keeps_all == (kept == [0, 1, 2, 3] and truncation.top_k == 0)


def test_truncation_looks_at_each_row_by_itself():
    rows = torch.cat([LOGITS, LOGITS.flip(-1)])
    kept = Truncation(top_p=0.8)(rows).isfinite()
    assert kept.tolist() == [[False, True, True, True], [True, True, True, False]]


def test_log_probability_of_a_draw():
    assert logprob_of(LOGITS, torch.tensor([1])).item() == pytest.approx(math.log(0.5), abs=1e-6)
    cut = Truncation(top_k=2)(LOGITS)
    assert logprob_of(cut, torch.tensor([3])).item() == pytest.approx(math.log(0.25 / 0.75), abs=1e-6)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"n": 0}, "n"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_response_length": 0}, "max_response_length"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, key):
    with pytest.raises(ConfigError) as caught:
        SamplingConfig(**config)
    assert caught.value.key == key


def test_with_truncation_the_sampler_draws_from_a_part_of_the_policy():
    assert SamplingConfig().draws_from_policy
    assert not SamplingConfig(top_p=0.6).draws_from_policy
    assert not SamplingConfig(top_k=3).draws_from_policy
