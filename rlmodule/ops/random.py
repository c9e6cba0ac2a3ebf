"""Keyed random numbers: each is a hash of integers such as (seed, sample, position), so it depends on no rank or batch.

The hash is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Unsigned 64-bit
arithmetic is done in int64, whose products wrap around to the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)


def uniform_of(keys: Tensor, seed: int) -> Tensor:
    """One uniform number per row of keys.

    Args:
        keys: [N, C] int64; equal rows give equal numbers.
        seed: seed of the numbers.

    Returns:
        [N] float64 in [0, 1).
    """
    state = _mix(torch.full_like(keys[:, 0], seed) * _STEP + 1)
    for column in keys.unbind(1):
        state = _mix(state ^ (column * _STEP))
    return _shift_right(state, 11).double() * 2.0**-53


def uniform_of_token(seed: Tensor, sample_id: Tensor, position: Tensor) -> Tensor:
    """The uniform number with which a token of a response is sampled.

    Args:
        seed, sample_id: [B] int64.
        position: [B] int64, index of the token in its response.

    Returns:
        [B] float64 in [0, 1), on the device of the arguments.
    """
    state = _mix(_mix(seed * _STEP + 1) ^ (sample_id * _STEP))
    # Adding multiples of the step to a state is the sequence of the generator itself: positions are its outputs.
    return _shift_right(_mix(state + (position + 1) * _STEP), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left, also for negative numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
