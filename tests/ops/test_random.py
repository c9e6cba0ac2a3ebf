"""Numbers that belong to a token."""

import torch

from rlmodule.ops.random import uniform_of


def test_a_number_depends_on_its_key_and_the_seed_alone():
    keys = torch.tensor([[3, 5], [-1, 2], [3, 5], [5, 3], [2**40, 0]])
    out = uniform_of(keys, 7)
    assert torch.equal(uniform_of(keys.flip(0), 7).flip(0), out)
    assert out[0] == out[2]
    assert len(set(out.tolist())) == 4
    assert not torch.equal(uniform_of(keys, 8), out)


def test_wrapping_int64_mixes_as_unsigned_arithmetic_does():
    """Against Python integers cut to 64 bits."""
    mask = (1 << 64) - 1

    def mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    for seed, sample in ((0, 0), (12, 3), (5, 10**15), (3, -1)):
        state = mixed(mixed((seed * step + 1) & mask) ^ (sample * step & mask))
        assert uniform_of(torch.tensor([[sample]]), seed).item() == (state >> 11) * 2.0**-53


def test_they_are_spread_evenly():
    keys = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    out = uniform_of(keys, 0)
    counts = torch.histc(out, bins=20, min=0, max=1)
    # 500 expected in each of 20 bins; chi-square with 19 degrees of freedom is below 44 in 99.9% of draws.
    assert ((counts - 500) ** 2 / 500).sum() < 44
    assert out.min() >= 0
    assert out.max() < 1
