"""Numbers that belong to a token."""

import pytest
import torch

from rlmodule.ops.random import uniform_of, uniform_of_token

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def mixed(x):
    """The finaliser of splitmix64 on Python integers, as its authors print it."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def test_a_number_depends_on_its_key_and_the_seed_alone():
    keys = torch.tensor([[3, 5], [-1, 2], [3, 5], [5, 3], [2**40, 0]])
    out = uniform_of(keys, 7)
    assert torch.equal(uniform_of(keys.flip(0), 7).flip(0), out)
    assert out[0] == out[2]
    assert len(set(out.tolist())) == 4
    assert not torch.equal(uniform_of(keys, 8), out)


@pytest.mark.parametrize(("seed", "sample"), [(0, 0), (12, 3), (5, 10**15), (3, -1)])
def test_wrapping_int64_mixes_as_unsigned_arithmetic_does(seed, sample):
    """Against Python integers cut to 64 bits."""
    state = mixed(mixed((seed * STEP + 1) & WORD) ^ (sample * STEP & WORD))
    assert uniform_of(torch.tensor([[sample]]), seed).item() == (state >> 11) * 2.0**-53


def test_the_number_of_a_token_is_that_of_the_formula_for_one_position_and_for_many():
    """A changed formula would change every run that is resumed or repeated."""
    keys = [(0, 0, 0), (3, 10**12, 7), (2**62, -3, 511), (-1, 5, 2**31)]
    expected = []
    for seed, sample, position in keys:
        word = mixed(mixed((seed * STEP + 1) & WORD) ^ (sample * STEP & WORD))
        expected.append((mixed((word + (position + 1) * STEP) & WORD) >> 11) / 2**53)
    seeds, samples, positions = torch.tensor(keys).unbind(1)
    assert uniform_of_token(seeds, samples, positions).tolist() == expected
    for i in range(len(keys)):
        assert (
            uniform_of_token(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1]).tolist() == expected[i : i + 1]
        )


def test_they_are_spread_evenly():
    keys = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    out = uniform_of(keys, 0)
    counts = torch.histc(out, bins=20, min=0, max=1)
    # 500 expected in each of 20 bins; chi-square with 19 degrees of freedom is below 44 in 99.9% of draws.
    assert ((counts - 500) ** 2 / 500).sum() < 44
    assert out.min() >= 0
    assert out.max() < 1
