"""Equal counts: fillers that top an iteration up until every rank and every mini-batch has the same number of samples.

A filler is as short as a sample can be, carries no loss and counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlmodule.core.types import SampleMeta


def required_multiple(dp_size: int, *mini_batch_sizes: int) -> int:
    """Smallest batch size that equal counts per rank and whole mini-batches of every trained model allow."""
    return math.lcm(dp_size, *mini_batch_sizes)


def top_up(metas: Sequence[SampleMeta], multiple: int, mini_batch_size: int) -> list[SampleMeta]:
    """Add fillers until the number of samples is a multiple; the samples keep their order.

    Args:
        metas: the samples.
        multiple: see ``required_multiple``.
        mini_batch_size: fillers are spread evenly over the mini-batches of this size, each at the end of its share.

    Returns:
        The samples and ``-len(metas) % multiple`` fillers of one prompt and one response token without loss; sample
        and group ids of fillers are negative and new.
    """
    size = len(metas) + -len(metas) % multiple
    num_fillers = size - len(metas)
    below = min([0, *(m.sample_id for m in metas), *(m.group_id for m in metas)])
    filled: list[SampleMeta] = []
    real = iter(metas)
    added = 0
    for start in range(0, size, mini_batch_size):
        end = min(start + mini_batch_size, size)
        due = end * num_fillers // size - added
        filled += [next(real) for _ in range(end - start - due)]
        filled += [_filler(below - added - i) for i in range(1, due + 1)]
        added += due
    return filled


def _filler(new_id: int) -> SampleMeta:
    return SampleMeta(sample_id=new_id, group_id=new_id, prompt_len=1, response_len=1, loss_tokens=0, is_padding=True)
