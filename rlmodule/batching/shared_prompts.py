"""What samples add to a micro-batch that computes a prompt once for all of its group.

Responses to one row of the data have one prompt, so its length tells which samples of a group share it. Leaves out how
they are laid out (``collate.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rlmodule.batching.partition import Ints
from rlmodule.batching.workload import Floats, Workload
from rlmodule.core.types import SampleMeta


def with_shared_prompts(
    metas: Sequence[SampleMeta], group: Ints, length: Ints, cost: Floats, workload: Workload
) -> tuple[Ints, Floats]:
    """Tokens and cost of each sample beside the others of its group.

    Args:
        metas: the samples.
        group: [n] the group of each, all of which is computed in one micro-batch.
        length: [n] tokens of each sample by itself.
        cost: [n] what it costs by itself.
        workload: the model of that cost.

    Returns:
        [n] tokens and [n] cost. The first computed sample of a group brings the prompt; those after it cost less by
        what the prompt costs. A sample that is left out keeps its own numbers.
    """
    prompt = np.fromiter((m.prompt_len for m in metas), np.int64, len(metas))
    own = np.maximum(length - prompt, 1)  # the last prompt token is computed for each, the last response token for none
    joins = np.fromiter((m.prompt_len > 1 and not m.is_skipped for m in metas), np.bool_, len(metas))
    key = np.where(joins, group * (prompt.max(initial=0) + 1) + prompt, -1 - np.arange(len(metas)))
    _, first, place, together = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    is_shared = together[place] > 1
    is_first = first[place] == np.arange(len(metas))
    tokens = np.where(is_shared, own + np.where(is_first, prompt - 1, 0), length)
    spared = np.where(is_shared & ~is_first, prompt, 0)
    return tokens, cost - workload.cost(spared, np.zeros_like(spared))


def repeated_prompt_tokens(metas: Sequence[SampleMeta], micro_batches: Iterable[Sequence[int]]) -> int:
    """Prompt tokens that are not computed again, over all given micro-batches of positions into ``metas``."""
    repeated = 0
    for micro_batch in micro_batches:
        together = Counter((metas[p].group_id, metas[p].prompt_len) for p in micro_batch if metas[p].prompt_len > 1)
        repeated += sum((count - 1) * prompt_len for (_, prompt_len), count in together.items())
    return repeated
