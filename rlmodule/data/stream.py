"""The endless, seeded order in which rows are drawn, and the one number that resumes it.

The position counts rows taken over the whole run by all ranks together, so it holds for any number of ranks, of
interruptions and of rows per iteration. Every rank asks for the rows of the whole iteration and keeps its share.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlmodule.core.errors import CheckpointError
from rlmodule.data.order import RowOrder, build_order


class PromptStream:
    """Row indices without end: every pass holds each row once, in an order made from the seed and the pass alone.

    Args:
        size: rows to choose from.
        seed: of the run; may be negative.
        shuffle: False repeats the order of the file.
        order: easy rows first, or parts mixed by weight; None: neither.
        limit: rows of the whole run; None: no end.
    """

    def __init__(
        self, size: int, seed: int, shuffle: bool = True, *, order: RowOrder | None = None, limit: int | None = None
    ) -> None:
        assert size > 0, "a stream needs rows"
        order = RowOrder((size,)) if order is None else order
        assert order.size == size, "the order is that of these rows"
        self.size, self.seed, self.shuffle, self.limit = size, seed, shuffle, limit
        self.consumed = 0  # rows taken since the start of the run
        self._order = build_order(order, seed, shuffle)

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next ``count`` rows; fewer where the run ends.

        Returns:
            (counter, row) pairs. Counters are unique within the run, so a row that comes twice, also within one call,
            gets two of them: group ids are made from the counter, never from the row.
        """
        first = self.consumed
        last = first + count if self.limit is None else min(first + count, max(first, self.limit))
        self.consumed = last
        return [(counter, self._order.row(counter)) for counter in range(first, last)]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps; the same on every rank."""
        return {"consumed": self.consumed, "size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            CheckpointError: the checkpoint counts rows of another order, so its position would mean other rows here.
        """
        for name, mine in self.state_dict().items():
            if name != "consumed" and state[name] != mine:
                raise CheckpointError(
                    f"the checkpoint stopped at prompt {state['consumed']} of an order with {name}={state[name]}, "
                    f"this run has {name}={mine}. Resume with the data and the seed of the checkpoint, "
                    f"or start a new run from its weights"
                )
        self.consumed = int(state["consumed"])
