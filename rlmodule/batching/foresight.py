"""What a packed row will take of a device's memory, by the plan and by rows before it; rows are cut before they fail.

For strategies whose processes wait for each other within a row: a process that has failed there cannot go back alone,
and those that wait for it cannot be told. So every process measures what its longest row needed, all agree on the most
tokens that fit everywhere, and all run as many rows. The first mini-batch of a model goes by the plan of the run.

Leaves out rows that are computed again (``row_limit.py``), rows whose tokens several processes share, and devices that
do not count their memory (CPUs).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlmodule.batching.cutting import cut, without_samples
from rlmodule.core.contract import Strategy
from rlmodule.core.types import MicroBatch, MiniBatch

# Of the memory that is free: an allocator cannot use all of it, since tensors of other sizes have left gaps.
USABLE = 0.95


# (name of a model, free bytes) -> tokens of the longest row that is expected to fit; infinity where nothing is known.
Foretold = Callable[[str, float], float]


def nothing_foretold(name: str, room: float) -> float:
    """Rows are run as planned until some were measured."""
    return math.inf


class DeviceMemory(Protocol):
    """The memory of the device a process computes on, in bytes."""

    def room(self) -> int:
        """What tensors may take beyond those there are."""

    def watch(self) -> None:
        """Begin to measure."""

    def rise(self) -> int:
        """The most that tensors took since ``watch``, beyond those there were."""


@dataclass
class AcceleratorMemory:
    """What torch's allocator counts."""

    device: torch.device
    _before: int = 0

    def room(self) -> int:
        """Free memory, and what the allocator holds without a tensor in it."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        idle = torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)
        return int(free + idle)

    def watch(self) -> None:
        """Forget the peak so far."""
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._before = torch.accelerator.memory_allocated(self.device)

    def rise(self) -> int:
        """The peak over what there was."""
        return int(torch.accelerator.max_memory_allocated(self.device)) - self._before


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of an accelerator; None for a device that does not count what tensors take."""
    if device.type in ("cpu", "mps"):
        return None
    try:
        torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):  # some allocators do not say
        return None
    return AcceleratorMemory(device)


@dataclass
class Foresight:
    """Cuts rows that will not fit, on all processes alike.

    Args:
        keep_groups: rows keep the samples of a group together.
        memory_of: the memory of a device; None where it is not counted.
        foretold: what fits of a model of which no row was measured on this process.
    """

    keep_groups: bool = False
    memory_of: Callable[[torch.device], DeviceMemory | None] = memory_of
    foretold: Foretold = nothing_foretold
    _took: dict[str, float] = field(default_factory=dict)  # bytes per token of each model's longest row so far
    _longest: dict[str, int] = field(default_factory=dict)

    def cut(self, strategy: Strategy, name: str, mini_batch: MiniBatch) -> tuple[Sequence[MicroBatch], int]:
        """The rows of this process, those above what every process has room for cut; and the most tokens of any row.

        Every process calls it. A process with fewer parts of a row than another one gets rows without loss, which count
        nowhere.
        """
        rows, longest, memory = mini_batch.micro_batches, mini_batch.longest_row, self.memory_of(strategy.root_device)
        layout = strategy.layout
        shares_rows = max(layout.sp_size, layout.max_sp_size, layout.pp_size) > 1
        if memory is None or shares_rows:
            return rows, longest
        fits = max(1.0, min(strategy.gather_from_all(self._fits(name, memory))))
        if fits >= longest:
            return rows, longest
        parts = [cut(row, math.floor(fits), keep_groups=self.keep_groups) for row in rows]
        counts = strategy.gather_from_all([len(part) for part in parts])  # [ranks][rows]
        if layout.rank == 0:
            by = "rows before it" if name in self._took else "the plan of the run"
            warnings.warn(_words(longest, math.floor(fits), by), stacklevel=2)
        wanted = [max(of_row) for of_row in zip(*counts, strict=True)]
        made = [
            row
            for part, count in zip(parts, wanted, strict=True)
            for row in (*part, *[without_samples(part[0])] * (count - len(part)))
        ]
        return made, math.floor(fits)

    def _fits(self, name: str, memory: DeviceMemory) -> float:
        """Tokens of the longest row that this process has room for."""
        took, room = self._took.get(name), USABLE * memory.room()
        return self.foretold(name, room) if took is None else room / took

    @contextmanager
    def measuring(self, strategy: Strategy, name: str, rows: Sequence[MicroBatch], longest_row: int) -> Iterator[None]:
        """Encloses the passes of a mini-batch; the longest row so far, or one as long, says what a token takes.

        What is needed whatever the row (gathered weights, gradients) is counted with it. So rows of less than half the
        length of ``longest_row``, over all processes, say nothing.
        """
        memory = self.memory_of(strategy.root_device)
        if memory is None:
            yield
            return
        memory.watch()
        yield
        longest = max(len(row.input_ids) for row in rows)
        if longest >= self._longest.get(name, 0) and 2 * longest >= longest_row:
            self._longest[name] = longest
            self._took[name] = max(memory.rise(), 1) / longest


def _words(longest: int, fits: int, by: str) -> str:
    return (
        f"a row of {longest} tokens would not fit in the memory of every process, going by {by}: rows of "
        f"this mini-batch above {fits} tokens are cut, on all processes, with the same numbers. "
        f"batching.max_token_len_per_gpu={fits} plans for it"
    )
