"""Ids and lengths of all samples of an iteration, column by column: a million of them are eight arrays of 31 MB.

Leaves out what else is known of a sample (``experience/sample_info.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.types import SampleMeta

Ints = NDArray[np.int64]
Counts = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SampleMetas(Sequence[SampleMeta]):
    """Reads as a sequence of SampleMeta; each is made when it is asked for.

    Args:
        sample_id, group_id: [n] int64, as in SampleMeta.
        prompt_len, response_len, loss_tokens: [n] int32, as in SampleMeta.
        is_padding, is_skipped, has_gradient: [n] bool, as in SampleMeta.
    """

    sample_id: Ints
    group_id: Ints
    prompt_len: Counts
    response_len: Counts
    loss_tokens: Counts
    is_padding: Bools
    is_skipped: Bools
    has_gradient: Bools

    @classmethod
    def of(cls, metas: Sequence[SampleMeta]) -> SampleMetas:
        """The columns of a sequence; itself where it has columns already."""
        if isinstance(metas, SampleMetas):
            return metas
        rows = [(m.sample_id, m.group_id, m.prompt_len, m.response_len, m.loss_tokens) for m in metas]
        marks = [(m.is_padding, m.is_skipped, m.has_gradient) for m in metas]
        numbers = np.array(rows, np.int64).reshape(-1, 5).T.copy()
        return cls(*numbers[:2], *numbers[2:].astype(np.int32), *np.array(marks, bool).reshape(-1, 3).T.copy())

    @property
    def length(self) -> Counts:
        """[n] prompt and response tokens together."""
        length: Counts = self.prompt_len + self.response_len
        return length

    @property
    def counts(self) -> Bools:
        """[n] whether it has loss tokens and is no padding sample."""
        counts: Bools = (self.loss_tokens > 0) & ~self.is_padding
        return counts

    def take(self, positions: Ints | Counts) -> SampleMetas:
        """The samples at these positions, in this order."""
        return SampleMetas(*(getattr(self, field.name)[positions] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.sample_id)

    @overload
    def __getitem__(self, index: int) -> SampleMeta: ...

    @overload
    def __getitem__(self, index: slice) -> SampleMetas: ...

    def __getitem__(self, index: int | slice) -> SampleMeta | SampleMetas:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return SampleMeta(*(getattr(self, field.name)[index].item() for field in fields(self)))
