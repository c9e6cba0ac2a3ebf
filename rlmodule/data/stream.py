"""The endless, seeded order in which prompt rows are answered, and the one number that resumes it.

The position counts rows taken over the whole run by all ranks together, so it holds for any number of ranks, of
interruptions and of rows per iteration. Every rank asks for the rows of the whole iteration and keeps its share.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlmodule.core.errors import CheckpointError

_WORD = 2**64 - 1  # a Philox key is two unsigned 64-bit words


class PromptStream:
    """Row indices without end: every pass holds each row once, in an order made from the seed and the pass alone.

    Args:
        size: rows to choose from.
        seed: of the run; may be negative.
        shuffle: False repeats the order of the file.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        assert size > 0, "a stream needs rows"
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.consumed = 0  # rows taken since the start of the run
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next ``count`` rows.

        Returns:
            (counter, row) pairs. Counters are unique within the run, so a row that comes twice, also within one call,
            gets two of them: group ids are made from the counter, never from the row.
        """
        first = self.consumed
        self.consumed += count
        return [(counter, self._row(counter)) for counter in range(first, self.consumed)]

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

    def _row(self, counter: int) -> int:
        number, location = divmod(counter, self.size)
        if number != self._pass:
            self._pass, self._order = number, self._order_of(number)
        return int(self._order[location])

    def _order_of(self, number: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.size)
        key = np.array([self.seed & _WORD, number], dtype=np.uint64)
        # Raw words and a stable sort: numpy may change what permutation() gives between versions, but not these.
        words = np.random.Philox(key=key).random_raw(self.size)
        return np.argsort(words, kind="stable")
