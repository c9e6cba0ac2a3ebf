"""What ranks exchange: small things between data ranks, slices of a row, shares of the vocabulary.

Leaves out process groups (``strategies/parts/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

Item = TypeVar("Item")


class Collectives(Protocol):
    """The few exchanges of small things between the ranks that train on tokens of their own (``Layout.dp_sp_size`` of
    them, in the order of ``Layout.dp_sp_rank``).

    Tensor ranks and pipeline stages repeat those tokens; they run the same exchange among themselves, so that every
    process gets the answer. In a world of one rank nothing is sent.
    """

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[K, C] float64, K the same on every rank -> [ranks, K, C] on the CPU; one collective."""

    def gather_objects(self, item: Item) -> list[Item]:
        """One picklable object per rank -> the objects of all ranks, in rank order."""

    def sum_numbers(self, numbers: Tensor) -> Tensor:
        """Integers, of one shape on all ranks -> their sums over ranks, on the CPU. One collective; may overwrite."""

    def exchange(self, outgoing: Sequence[Item]) -> list[Item]:
        """Send ``outgoing[r]`` to rank r; returns what every rank sent to this one, in rank order."""

    def broadcast(self, item: Item) -> Item:
        """Rank 0's picklable object, on every rank."""


class SequenceRanks(Protocol):
    """The sequence-parallel group, as a model and its loss see it: each rank holds one slice of the packed row.

    Which positions that are is in ``core/slices.py``. A row may be cut into parts whose tokens attend on different
    ranks (context parallelism); without, there is one part. Every method but ``own_heads`` is a collective: all ranks
    of the group call it in the same order.
    """

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place in the group, which is the number of its slice."""

    @property
    def num_parts(self) -> int:
        """Parts of the row."""

    @property
    def part(self) -> int:
        """The part whose queries this process computes."""

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, T/size, D] of this slice -> its share of the heads, h of them; differentiable.

        Queries [1, h, T/num_parts, D] of this process's part, keys and values [1, h, T, D] of the whole row, one part
        after the other.
        """

    def gather_heads(self, out: Tensor) -> Tensor:
        """[1, T/num_parts, h, D] of this process's part -> [1, T/size, heads, D] of its slice; differentiable."""

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads, ...] -> [h, ...]: those of the heads whose attention this process computes."""

    def exchange(self, value: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """[sum(sent), ...], those for each rank one after the other -> [sum(received), ...]; differentiable."""

    def sum_over_slices(self, value: Tensor) -> Tensor:
        """The sum of all ranks' ``value``, on every rank; differentiable. For losses over whole sequences."""

    def gather_slices(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """[n] of this slice, for each micro-batch -> [N] of its whole row, on every rank; one exchange for all.

        ``places`` [n] int64 says where each belongs in the row (``MicroBatch.places``).
        """


class VocabularyRanks(Protocol):
    """The ranks that share the vocabulary: each has as many consecutive rows of the head, in the order of their places.

    Every method is a collective: all ranks of the group call it in the same order, with tensors of one shape.
    """

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This process's place in the group, which is the place of its rows in the vocabulary."""

    def max_(self, x: Tensor) -> Tensor:
        """The largest of all ranks' ``x``, element by element; may overwrite it. Not differentiable."""

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; may overwrite it. Not differentiable."""
