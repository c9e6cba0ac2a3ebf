"""Models that run one sample per row, for families in which samples laid end to end would see each other.

Such a model is transformers' own, with its own attention and masks: rows are samples of one length, and nothing is
padded. That is right for every family that computes from left to right, and slower than a packed row. While it is
decoded, rows of one length go on together, with the model's own cache; where a family has none that can be used, every
new token reads its row again.

Leaves out which families need it (``agreement.py``) and micro-batches of one sample (``run/``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rlmodule.models.row_states import new_cache, select_rows
from rlmodule.ops.segments import SegmentBuckets


class RowMode(Enum):
    """How samples share rows, in training and in sampling; ``agreement.py`` takes the first that a family can do."""

    PACKED = "samples laid end to end"
    PACKED_UNCACHED = "every sampled token reads its row again"
    ALONE = "one sample per row"
    ALONE_UNCACHED = "one sample per row, and every sampled token reads its row again"

    @property
    def is_alone(self) -> bool:
        """Whether a row holds one sample."""
        return self in (RowMode.ALONE, RowMode.ALONE_UNCACHED)

    @property
    def is_cached(self) -> bool:
        """Whether a sampled token goes on from what the model kept of those before."""
        return self in (RowMode.PACKED, RowMode.ALONE)


def trunk(lm: PreTrainedModel, input_ids: Tensor, cache: Cache | None = None) -> Tensor:
    """[rows, length] ids of whole samples, or of what follows the cache -> [rows, length, H] last hidden states."""
    options = {} if cache is None else {"cache": cache}
    return lm.base_model(  # type: ignore[no-any-return]
        input_ids=input_ids, use_cache=cache is not None, **options
    ).last_hidden_state


def hidden_alone(lm: PreTrainedModel, input_ids: Tensor, segments: SegmentBuckets) -> Tensor:
    """[T] ids of a packed row -> [T, H] last hidden states, as of each sample in a row of its own."""
    layout = segments.whole_unpadded
    return layout.packed_of([trunk(lm, rows) for rows in layout.rows_of(input_ids)])


class KeptRows(Protocol):
    """Rows that are decoded, where it is not keys and values alone that are kept of them."""

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``; there may be more or fewer than before."""


class GoingOn(KeptRows, Protocol):
    """Rows of a model that does not decode with our attention."""

    def go_on(self, input_ids: Tensor) -> Tensor:
        """[B] one new token for each row -> [B, H] its hidden states."""


@dataclass(eq=False)
class _Group:
    """Rows of one length: their numbers [g] in the batch, and what the model keeps of them."""

    rows: Tensor
    cache: Cache


@dataclass(eq=False)
class RowsOfOneLength:
    """The rows of a batch that is decoded with the model's own cache, in groups of one length.

    Args:
        lm: the model.
        groups: what it keeps.
    """

    lm: PreTrainedModel
    groups: list[_Group] = field(default_factory=list)

    def fill(self, input_ids: Tensor, segments: SegmentBuckets) -> Tensor:
        """[T] ids of prompts laid end to end -> [B, H] hidden states of the last token of each."""
        layout = segments.whole_unpadded
        rows = layout.segment.to(input_ids.device).split([bucket.rows for bucket in layout.buckets])
        self.groups = [_Group(of_bucket, new_cache(self.lm)) for of_bucket in rows]
        return self._last(list(layout.rows_of(input_ids)))

    def go_on(self, input_ids: Tensor) -> Tensor:
        """[B] one new token for each row -> [B, H] its hidden states."""
        return self._last([input_ids.index_select(0, group.rows)[:, None] for group in self.groups])

    def _last(self, new: Sequence[Tensor]) -> Tensor:
        """[g, length] new tokens of each group -> [B, H] hidden states of the last of each row."""
        last = [trunk(self.lm, ids, group.cache)[:, -1] for ids, group in zip(new, self.groups, strict=True)]
        order = torch.cat([group.rows for group in self.groups])
        return torch.cat(last).index_select(0, order.argsort())

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``; there may be more or fewer than before."""
        groups = []
        for group in self.groups:
            new, member = (rows[:, None] == group.rows).nonzero(as_tuple=True)
            if len(new):
                select_rows(group.cache, member)
                groups.append(_Group(new, group.cache))
        self.groups = groups


@dataclass(eq=False)
class RowsReadAgain:
    """The rows of a batch that is decoded by a model without a cache that could be used.

    Args:
        read: [T] ids of rows laid end to end, and where each begins -> [T, H] last hidden states.
        rows: tokens of each row so far.
    """

    read: Callable[[Tensor, SegmentBuckets], Tensor]
    rows: list[Tensor] = field(default_factory=list)

    def fill(self, input_ids: Tensor, segments: SegmentBuckets) -> Tensor:
        """[T] ids of prompts laid end to end -> [B, H] hidden states of the last token of each."""
        self.rows = list(input_ids.split(segments.length.tolist()))
        return self._last(input_ids, segments)

    def go_on(self, input_ids: Tensor) -> Tensor:
        """[B] one new token for each row -> [B, H] its hidden states."""
        self.rows = [torch.cat([row, new]) for row, new in zip(self.rows, input_ids.split(1), strict=True)]
        ends = torch.tensor([0, *(len(row) for row in self.rows)]).cumsum(0)
        return self._last(torch.cat(self.rows), SegmentBuckets.from_cu_seqlens(ends, input_ids.device))

    def _last(self, input_ids: Tensor, segments: SegmentBuckets) -> Tensor:
        last = (segments.start + segments.length - 1).to(input_ids.device)
        return self.read(input_ids, segments).index_select(0, last)

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row ``rows[i]``; there may be more or fewer than before."""
        self.rows = [self.rows[row] for row in rows.tolist()]
