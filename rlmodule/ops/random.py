"""Random numbers that belong to a token: a function of (seed, sample, place), so neither rank nor cut has a say."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)


def uniform_of(keys: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1).

    Args:
        keys: [N, C] int64; equal rows get equal numbers.
        seed: another seed gives other numbers.

    Returns:
        [N] float64.
    """
    state = mixed(torch.full_like(keys[:, 0], seed) * STEP + 1)
    for column in keys.unbind(1):
        state = mixed(state ^ (column * STEP))
    return to_unit_interval(state)


def to_unit_interval(state: Tensor) -> Tensor:
    """[...] int64 of mixed bits -> float64 in [0, 1), made of the upper 53 bits."""
    return _shifted(state, 11).double() * 2.0**-53


def mixed(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014); int64 products wrap around as unsigned ones do."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: the sign is a bit like any other."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
