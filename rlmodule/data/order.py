"""In which order rows come: shuffled by a seed, easy ones first, or mixed from several files by weight.

Each order is a function of its arguments and the counter of a row alone, so a run that was stopped goes on exactly.
Leaves out how far a run has come (``stream.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.errors import DataError
from rlmodule.data.config import DataConfig
from rlmodule.data.rows import TableRows

BLOCK = 1000  # rows drawn, of which every part has its share, to a whole row

_WORD = 2**64 - 1  # a Philox key is two unsigned 64-bit words
_PASSES = 2**40  # of one part, before its key would be another part's
_JITTER = 2**63  # beside the keys of passes


@dataclass(frozen=True, eq=False)
class RowOrder:
    """What decides the order beside the seed.

    Args:
        sizes: rows of each part; parts lie end to end.
        weights: share of each part in what is drawn, to any scale; empty draws all rows alike.
        values: [rows] a number of each, low ones first; None: no order among rows.
        stages: stages of equal size, in any order inside; None: strictly ascending.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] = ()
    values: NDArray[np.float64] | None = None
    stages: int | None = None

    @property
    def size(self) -> int:
        """All rows."""
        return sum(self.sizes)


def order_of(rows: TableRows, kept: NDArray[np.int64], config: DataConfig) -> RowOrder:
    """The order of the rows in use.

    Args:
        rows: all of them.
        kept: [P] positions in ``rows`` of those in use, ascending.
        config: ``weights``, ``curriculum`` and ``curriculum_stages``.

    Raises:
        DataError: a row has no number to order it by, or an entry with a weight has no row in use.
    """
    sizes: tuple[int, ...] = (len(kept),)
    if config.weights:
        ends = np.searchsorted(kept, rows.entry_ends)
        sizes = tuple(map(int, np.diff(ends, prepend=0)))
        if 0 in sizes:
            raise DataError(
                location=config.train_files[sizes.index(0)],
                because="no row of it is in use, so nothing can be drawn from it",
                fix="Take it and its weight out",
            )
    values = rows.numbers(config.curriculum)[kept] if config.curriculum else None
    return RowOrder(sizes, tuple(config.weights), values, config.curriculum_stages)


class PassOrder:
    """Pass after pass over one part: every pass holds each row once, in an order made from the seed and the pass alone.

    Args:
        size: rows of the part.
        seed: of the run; may be negative.
        shuffle: False repeats the order of the file.
        part: its number, which keys its shuffles.
        values, stages: as in ``RowOrder``, of this part.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        shuffle: bool,
        part: int = 0,
        values: NDArray[np.float64] | None = None,
        stages: int | None = None,
    ) -> None:
        self._size, self._seed, self._shuffle, self._part = size, seed, shuffle, part
        self._levels = values if values is None or stages is None else _stages(values, stages)
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def row(self, counter: int) -> int:
        """The row that is drawn after ``counter`` others."""
        number, location = divmod(counter, self._size)
        if number != self._pass:
            self._pass, self._order = number, self._order_of(number)
        return int(self._order[location])

    def _order_of(self, number: int) -> NDArray[np.int64]:
        order = np.arange(self._size)
        if self._shuffle:
            # Raw words and a stable sort: numpy may change what permutation() gives between versions, but not these.
            order = np.argsort(_words(self._seed, number + self._part * _PASSES, self._size), kind="stable")
        if self._levels is not None:
            order = order[np.argsort(self._levels[order], kind="stable")]
        return order


class MixedOrder:
    """Rows of several parts, each by its own passes, in the proportion of their weights.

    Of every ``BLOCK`` rows each part gives its share to a whole row (one at least), spread evenly, with a seeded jitter
    so that no rank that takes every n-th row sees one part alone. Small parts come round more often than large ones.

    Args:
        order: of the rows.
        seed, shuffle: as in ``PassOrder``; without shuffling there is no jitter.
    """

    def __init__(self, order: RowOrder, seed: int, shuffle: bool) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._starts = [sum(order.sizes[:part]) for part in range(len(order.sizes))]
        self._shares = _shares(order.weights)
        self._passes = [
            PassOrder(size, seed, shuffle, part, _slice(order.values, start, size), order.stages)
            for part, (start, size) in enumerate(zip(self._starts, order.sizes, strict=True))
        ]
        self._block, self._drawn = -1, np.empty((0, 2), dtype=np.int64)

    def row(self, counter: int) -> int:
        """The row that is drawn after ``counter`` others."""
        block, location = divmod(counter, BLOCK)
        if block != self._block:
            self._block, self._drawn = block, self._draws_of(block)
        part, number = map(int, self._drawn[location])
        return self._starts[part] + self._passes[part].row(block * self._shares[part] + number)

    def _draws_of(self, block: int) -> NDArray[np.int64]:
        """[BLOCK, 2] part of each row of a block, and the row's number among those of its part."""
        parts = np.repeat(np.arange(len(self._shares)), self._shares)
        numbers = np.concatenate([np.arange(share) for share in self._shares])
        within = np.full(BLOCK, 0.5)
        if self._shuffle:
            within = _words(self._seed, _JITTER + block, BLOCK) / 2.0**64
        when = (numbers + within) / np.repeat(self._shares, self._shares)
        order = np.argsort(when, kind="stable")
        return np.stack([parts[order], numbers[order]], axis=1)


def build_order(order: RowOrder, seed: int, shuffle: bool) -> PassOrder | MixedOrder:
    """The order that ``order`` describes."""
    if order.weights:
        return MixedOrder(order, seed, shuffle)
    return PassOrder(order.size, seed, shuffle, 0, order.values, order.stages)


def _words(seed: int, number: int, count: int) -> NDArray[np.uint64]:
    key = np.array([seed & _WORD, number], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def _slice(values: NDArray[np.float64] | None, start: int, size: int) -> NDArray[np.float64] | None:
    return None if values is None else values[start : start + size]


def _stages(values: NDArray[np.float64], stages: int) -> NDArray[np.int64]:
    """[rows] number of the stage of each, by rank; equal values come in file order."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks * stages // len(values)


def _shares(weights: Sequence[float]) -> list[int]:
    """Rows of each part in a block: by largest remainder, and one at least."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: int(exact[part]) - exact[part])
    for part in by_remainder[: max(0, BLOCK - sum(shares))]:
        shares[part] += 1
    while sum(shares) > BLOCK:  # parts that got one row although they weigh less
        shares[shares.index(max(shares))] -= 1
    return shares
