"""A packed row that does not fit in the memory of the device is cut by samples and computed again: the same numbers.

Losses divide by the totals of the whole mini-batch, so the cut has no effect on them. A process cuts its own rows and
tells no other: that is possible where no process waits for another one within a row. Where one does (sharded weights,
rows that are cut over ranks), rows that will not fit are cut beforehand where that can be foreseen (``foresight.py``);
one that fails all the same ends the run with words that say which budget to go on with.

Leaves out how a row is cut (``cutting.py``), and errors of sampling and of the optimizer.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

import torch

from rlmodule.batching.cutting import cut, is_one_unit
from rlmodule.batching.foresight import DeviceMemory, Foresight, Foretold, memory_of, nothing_foretold
from rlmodule.core.contract import Backward, ModelObjective, Strategy
from rlmodule.core.errors import TrainingError, in_one_line
from rlmodule.core.metrics import Metrics
from rlmodule.core.types import MicroBatch, MiniBatch, StepTotals, TokenOutputs

Result = TypeVar("Result")
Rows = Sequence[MicroBatch]

ONE_BY_ONE = (
    "Use shorter samples, model.activation_checkpointing=full, a strategy that shards the model (strategy=fsdp2), or "
    "strategy.sp_size=2"
)


@dataclass
class RowLimit:
    """The most tokens of a row that this process computes, lowered whenever one does not fit.

    Args:
        keep_groups: rows that a loss is computed of keep the samples of a group together.
        tokens: the limit; infinity until a row does not fit.
        memory_of, foretold: the memory of a device, and what fits of a model by the plan of the run, for rows that must
            be cut before they fail.
    """

    keep_groups: bool = False
    tokens: float = math.inf
    memory_of: Callable[[torch.device], DeviceMemory | None] = memory_of
    foretold: Foretold = nothing_foretold
    _foresight: Foresight = field(init=False)
    _fitted: list[int] = field(default_factory=lambda: [0, 0])  # longest rows that fitted once, and twice

    def __post_init__(self) -> None:
        self._foresight = Foresight(self.keep_groups, self.memory_of, self.foretold)

    def forward_backward(
        self, strategy: Strategy, name: str, mini_batch: MiniBatch, objective: ModelObjective, backward: Backward
    ) -> list[Metrics]:
        """``Strategy.forward_backward`` of a whole mini-batch.

        Ranks that average gradients while the last micro-batch runs cannot run it again. So gradients are averaged
        afterwards as long as the mini-batch has a longer row, on any rank, than those that fitted twice: the second
        time, the moments of the optimizer were there as well.

        Raises:
            TrainingError: samples do not fit one by one, or no process can try again by itself.
        """
        longest = mini_batch.longest_row
        is_tried = strategy.layout.world_size > 1 and 0 < longest <= self._fitted[1]

        def train(rows: Rows) -> list[Metrics]:
            return strategy.forward_backward(name, rows, objective, mini_batch.totals, backward)

        if strategy.exchanges_within_rows:
            rows: Rows = mini_batch.micro_batches
            if not is_tried:
                rows, longest = self._foresight.cut(strategy, name, mini_batch)
            with _ends_in_words(rows), self._foresight.measuring(strategy, name, rows, longest):
                metrics = train(rows)
            if len(rows) == len(mini_batch.micro_batches):
                self._note_fitted(longest)
            return metrics
        if is_tried:
            with _ends_in_words(mini_batch.micro_batches):
                return train(self._cut(mini_batch.micro_batches, self.keep_groups))
        with strategy.averaged_afterwards(name):
            restart = partial(_clear_gradients, strategy, name)
            metrics = self._until_it_fits(train, mini_batch.micro_batches, strategy, self.keep_groups, restart)
        self._note_fitted(longest)
        return metrics

    def _note_fitted(self, longest: int) -> None:
        """A mini-batch of rows of at most ``longest`` tokens, on any rank, has been computed."""
        self._fitted = [max(self._fitted[0], longest), max(self._fitted[1], min(self._fitted[0], longest))]

    def evaluate(
        self, strategy: Strategy, name: str, rows: Rows, objective: ModelObjective, totals: StepTotals
    ) -> list[Metrics]:
        """``Strategy.evaluate``; raises as ``forward_backward``."""

        def measure(some: Rows) -> list[Metrics]:
            return strategy.evaluate(name, some, objective, totals)

        if strategy.exchanges_within_rows:
            with _ends_in_words(rows):
                return measure(rows)
        return self._until_it_fits(measure, rows, strategy, self.keep_groups)

    def forward(
        self,
        strategy: Strategy,
        name: str,
        rows: Iterable[MicroBatch],
        outputs: frozenset[str],
        *,
        with_adapter: bool = True,
    ) -> list[TokenOutputs]:
        """``Strategy.forward``; raises as ``forward_backward``."""

        def score(some: Iterable[MicroBatch]) -> list[TokenOutputs]:
            return strategy.forward(name, some, outputs, with_adapter=with_adapter)

        if strategy.exchanges_within_rows:
            with _ends_in_words(()):
                return score(rows)
        with strategy.eval_mode(name):
            return [_joined(self._until_it_fits(score, [row], strategy, keep_groups=False)) for row in rows]

    def _cut(self, rows: Rows, keep_groups: bool) -> Rows:
        """The rows, with those above the limit cut."""
        if math.isinf(self.tokens):
            return rows
        limit = int(self.tokens)
        return [
            part for row in rows for part in (cut(row, limit, keep_groups=keep_groups) if _size(row) > limit else [row])
        ]

    def _until_it_fits(
        self,
        compute: Callable[[Rows], Result],
        rows: Rows,
        strategy: Strategy,
        keep_groups: bool,
        restart: Callable[[], None] = lambda: None,
    ) -> Result:
        """``compute(rows)``, with rows cut until it fits; ``restart`` clears what a failed attempt has left."""
        while True:
            rows = self._cut(rows, keep_groups)
            done, problem = _attempt(compute, rows)
            if problem is None:
                return done[0]
            restart()
            self._lower(rows, strategy, keep_groups, problem)

    def _lower(self, rows: Rows, strategy: Strategy, keep_groups: bool, problem: str) -> None:
        """Halve the limit, and say so.

        Raises:
            TrainingError: no row can be cut any more.
        """
        cuttable = [_size(row) for row in rows if not is_one_unit(row, keep_groups=keep_groups)]
        where = f"rank {strategy.layout.rank}, {strategy.root_device}"
        if not cuttable:
            unit = "group" if keep_groups else "sample"
            raise TrainingError(
                f"batching.max_token_len_per_gpu: a single {unit} of {max(map(_size, rows))} tokens does not fit in "
                f"the memory of {where} ({problem}), whatever the budget. {ONE_BY_ONE}"
            )
        self.tokens = max(cuttable) // 2
        warnings.warn(
            f"a row of {max(cuttable)} tokens does not fit in the memory of {where}: it is cut and computed again, "
            f"with the same numbers, and so are rows above {self.tokens} tokens from now on. "
            f"batching.max_token_len_per_gpu={self.tokens} plans for it",
            stacklevel=2,
        )


def _attempt(compute: Callable[[Rows], Result], rows: Rows) -> tuple[list[Result], str | None]:
    """The result, or none and what the allocator said; no tensor of a failed attempt is alive afterwards."""
    try:
        return [compute(rows)], None
    except torch.OutOfMemoryError as error:
        problem = in_one_line(error)
    gc.collect()  # frames of the traceback may refer to each other
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return [], problem


@contextmanager
def _ends_in_words(rows: Rows) -> Iterator[None]:
    """Says which budget to go on with, where processes wait for each other and none can try again by itself.

    Raises:
        TrainingError: instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        longest = max(map(_size, rows), default=0)
        row, half = (f"a row of {longest} tokens", longest // 2) if longest else ("a packed row", "N")
        raise TrainingError(
            f"batching.max_token_len_per_gpu: {row} does not fit in the memory of this process ({in_one_line(error)}), "
            "and other processes wait for this one, so that it cannot cut the row and compute it again. Go on from the "
            f"last checkpoint with resume=auto batching.max_token_len_per_gpu={half}; the numbers do not depend on it"
        ) from error


def _size(row: MicroBatch) -> int:
    return len(row.input_ids)


def _clear_gradients(strategy: Strategy, name: str) -> None:
    for _, parameter in strategy.named_parameters(name):
        parameter.grad = None


def _joined(parts: Sequence[TokenOutputs]) -> TokenOutputs:
    """The outputs of a row from those of its parts, in order."""
    if len(parts) == 1:
        return parts[0]
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(TokenOutputs)}
    return TokenOutputs(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})
