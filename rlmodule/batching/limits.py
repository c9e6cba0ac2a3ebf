"""Samples and groups that no plan has room for, refused with the numbers and a remedy.

The plan assumes afterwards that every item fits. Leaves out what follows from the settings alone (``preflight/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.partition import Ints
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import SampleMeta


def check_lengths(metas: Sequence[SampleMeta], token_budget: int, sp_size: int) -> None:
    """No sample is longer than a micro-batch.

    Args:
        metas: the samples that are computed.
        token_budget: most tokens of one micro-batch.
        sp_size: sequence ranks that share them.

    Raises:
        ConfigError: names the longest one.
    """
    longest = max(metas, key=lambda m: m.length, default=None)
    if longest is None or longest.length <= token_budget:
        return
    raise ConfigError(
        key="batching.max_token_len_per_gpu",
        got=token_budget // sp_size,
        because=f"sample {longest.sample_id} has {longest.length} tokens ({longest.prompt_len} prompt + "
        f"{longest.response_len} response), one micro-batch holds {token_budget} (sp_size={sp_size})",
        fix=f"Use {-(-longest.length // sp_size)} or more, raise sp_size, or shorten prompts and responses",
    )


def check_groups(
    metas: Sequence[SampleMeta],
    group: Ints,
    length: Ints,
    *,
    mini_batch_size: int,
    micro_batch_size: int | None,
    token_budget: int,
    sp_size: int,
) -> None:
    """No group has more samples than a mini-batch, nor computes more than one micro-batch holds.

    Args:
        metas: the samples.
        group: [n] their groups, numbered from 0.
        length: [n] tokens that each adds to a micro-batch, 0 where it is not computed.
        mini_batch_size: samples of one optimizer step.
        micro_batch_size: samples of one micro-batch; None where tokens are counted.
        token_budget: most tokens of one micro-batch.
        sp_size: sequence ranks that share them.

    Raises:
        ConfigError: names the largest group.
    """
    names = {int(number): m.group_id for number, m in zip(group, metas, strict=True)}
    samples = np.bincount(group)
    tokens = np.bincount(group, weights=length)
    _refuse_larger(names, samples, "samples", "mini_batch_size", mini_batch_size)
    if micro_batch_size is None:
        _refuse_larger(names, tokens, "tokens", "max_token_len_per_gpu", token_budget, sp_size)
    else:
        _refuse_larger(names, samples, "samples", "micro_batch_size_per_gpu", micro_batch_size)


def _refuse_larger(
    names: Mapping[int, int], held: NDArray[Any], unit: str, key: str, limit: int, ranks: int = 1
) -> None:
    """``held`` is [G], in ``unit``; ``limit`` is what ``ranks`` devices hold together."""
    most = int(held.max(initial=0))
    if most > limit:
        raise ConfigError(
            key=f"batching.{key}",
            got=limit // ranks,
            because=f"batching.keep_groups keeps the {most} {unit} of group {names[int(held.argmax())]} together, "
            f"and {limit} fit",
            fix=f"Use {-(-most // ranks)} or more, or batching.keep_groups=false",
        )
