"""What layers keep of each row while it is decoded, in transformers' own cache classes: joined and chosen by row.

Which class keeps it, and under which attributes, differs between families; that every tensor in it has a row for each
row of the batch does not. Leaves out keys and values of our own attention (``attention.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

KEEPERS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)  # objects whose attributes hold the states


def new_cache(lm: PreTrainedModel) -> Cache:
    """An empty cache of the kind that the model makes for itself: one class of its own (MiniMax), or the usual one."""
    beside_the_model = vars(sys.modules[type(lm).__module__])
    own = [c for c in beside_the_model.values() if isinstance(c, type) and issubclass(c, Cache)]
    own = [c for c in own if c.__module__ == type(lm).__module__]
    return own[0]() if own else DynamicCache(config=lm.config)


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Row i of everything in ``cache`` becomes a copy of its row ``rows[i]``, in place."""
    _change(lambda tensors: tensors[0].index_select(0, rows), [cache])


def join_rows(caches: Sequence[Cache]) -> Cache:
    """One cache with the rows of all of them, made in the first."""
    _change(torch.cat, list(caches))
    return caches[0]


def _change(change: Callable[[list[Tensor]], Tensor], same: list[Any]) -> Any:
    """Apply ``change`` to the tensors at one place of objects that are built alike; returns what stands there then."""
    first = same[0]
    if isinstance(first, Tensor):
        return change(same) if first.ndim > 1 else first  # numbers that say how far a layer has come have no rows
    if isinstance(first, dict):
        return {key: _change(change, [one[key] for one in same]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_change(change, list(ones)) for ones in zip(*same, strict=True))
    if isinstance(first, KEEPERS):
        for name in vars(first):
            setattr(first, name, _change(change, [getattr(one, name) for one in same]))
    return first


@dataclass(eq=False)
class RowStates:
    """States of state layers for all rows of a batch.

    Args:
        new: makes an empty cache.
        by_bucket: what a prefill fills, one cache for the rows of each bucket.
        cache: of all rows, once they are joined.
    """

    new: Callable[[], Cache]
    by_bucket: list[Cache] = field(default_factory=list)
    cache: Cache | None = None

    def of_buckets(self, count: int) -> list[Cache]:
        """The caches that a prefill of ``count`` buckets fills, the same for every layer."""
        self.by_bucket = self.by_bucket or [self.new() for _ in range(count)]
        return self.by_bucket

    def join(self, rows: Tensor) -> None:
        """After a prefill: the rows of all buckets as one batch, of which row i is number ``rows[i]``."""
        if self.by_bucket:
            self.cache = join_rows(self.by_bucket)
            self.by_bucket = []
            self.select(rows)

    def append(self, other: RowStates) -> None:
        """The rows of ``other`` come after these; it is of no use afterwards."""
        if self.cache is not None and other.cache is not None:
            self.cache = join_rows([self.cache, other.cache])

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``; there may be more or fewer than before."""
        if self.cache is not None:
            select_rows(self.cache, rows)
