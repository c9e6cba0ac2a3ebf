"""Tokens and cost of samples whose micro-batch computes the prompt of a group once.

Samples of a group with equal prompt lengths have the same prompt: they are responses to one row of the data. The packed
layout is in ``collate.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats, Workload
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta


def with_shared_prompts(
    metas: Sequence[SampleMeta], group: Ints, length: Ints, cost: Floats, workload: Workload
) -> tuple[Ints, Floats]:
    """Tokens and cost that each sample adds to a micro-batch with the other samples of its group.

    Args:
        metas: the samples.
        group: [n] group number of each; a group is computed in one micro-batch.
        length: [n] tokens of each sample without sharing.
        cost: [n] cost of each sample without sharing.
        workload: cost model that gave ``cost``.

    Returns:
        [n] tokens and [n] cost. The first computed sample of a group includes the prompt, the others do not. Skipped
        samples keep their own numbers.
    """
    columns = SampleMetas.of(metas)
    prompt = columns.prompt_len.astype(np.int64)
    own = np.maximum(length - prompt, 1)  # plus the last prompt token, minus the last response token
    may_share = (prompt > 1) & ~columns.is_skipped
    key = np.where(may_share, group * (prompt.max(initial=0) + 1) + prompt, -1 - np.arange(len(metas)))
    _, first, index, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    is_shared = count[index] > 1
    is_first = first[index] == np.arange(len(metas))
    tokens = np.where(is_shared, own + np.where(is_first, prompt - 1, 0), length)
    saved = np.where(is_shared & ~is_first, prompt, 0)
    return tokens, cost - workload.cost(saved, np.zeros_like(saved))


def repeated_prompt_tokens(metas: SampleMetas, cell: Ints) -> int:
    """Prompt tokens saved by sharing, over all micro-batches; ``cell`` is [n], the micro-batch of each sample."""
    keys = np.stack([cell, metas.group_id, metas.prompt_len])[:, metas.prompt_len > 1]
    prompts, count = np.unique(keys, axis=1, return_counts=True)
    return int(((count - 1) * prompts[2]).sum())
