"""Padding samples that give every rank and every mini-batch of an iteration the same number of samples.

A padding sample has one prompt and one response token and no loss; no count or metric includes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlmodule.core.types import SampleMeta


def required_multiple(dp_size: int, *mini_batch_sizes: int) -> int:
    """Least common multiple of dp_size and the mini-batch size (in samples) of every trained model."""
    return math.lcm(dp_size, *mini_batch_sizes)


def top_up(metas: Sequence[SampleMeta], multiple: int, mini_batch_size: int) -> list[SampleMeta]:
    """Add padding samples until the number of samples is a multiple; real samples keep their order.

    Args:
        metas: real samples.
        multiple: see ``required_multiple``.
        mini_batch_size: samples of a mini-batch; padding samples are spread evenly over mini-batches and stand at the
            end of each.

    Returns:
        The samples and ``-len(metas) % multiple`` padding samples, whose sample and group ids are negative and unused.
    """
    size = len(metas) + -len(metas) % multiple
    num_padding = size - len(metas)
    below = min([0, *(m.sample_id for m in metas), *(m.group_id for m in metas)])
    padded: list[SampleMeta] = []
    real = iter(metas)
    added = 0
    for start in range(0, size, mini_batch_size):
        end = min(start + mini_batch_size, size)
        due = end * num_padding // size - added
        padded += [next(real) for _ in range(end - start - due)]
        padded += [_padding_meta(below - added - i) for i in range(1, due + 1)]
        added += due
    return padded


def _padding_meta(new_id: int) -> SampleMeta:
    return SampleMeta(sample_id=new_id, group_id=new_id, prompt_len=1, response_len=1, loss_tokens=0, is_padding=True)
