"""The LightningDataModule: one epoch is one iteration, so the train loader is made anew each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from rlmodule.core.types import MiniBatch, ScoredSample
from rlmodule.data.stream import PromptStream
from rlmodule.experience import ExperienceMaker, Iteration, Stopwatch
from rlmodule.shaping import KLController
from rlmodule.sources import Source


class RLDataModule(L.LightningDataModule):
    """Collects samples, makes experience of them, hands out mini-batches.

    Args:
        source: gives this rank's samples.
        stream: the position in the prompts, saved with a checkpoint.
        make: builds the experience maker for one iteration, once the strategy is set up.
        kl_controller: the price of KL in the reward, saved with a checkpoint; None where it is not in the reward.
        start: called when an iteration begins, with its number; for progress displays.
    """

    def __init__(
        self,
        source: Source,
        stream: PromptStream,
        make: Callable[[int], ExperienceMaker],
        *,
        kl_controller: KLController | None = None,
        start: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        super().__init__()
        self.source = source
        self.stream = stream
        self.make = make
        self.kl_controller = kl_controller
        self.start = start
        self.next_iteration = 0
        self.watch = Stopwatch()
        self.collected: list[ScoredSample] = []  # this rank's samples of the iteration, as sampled
        self.iteration: Iteration | None = None
        self._loader: DataLoader[MiniBatch] | None = None

    def train_dataloader(self) -> DataLoader[MiniBatch]:
        """Samples of the next iteration, planned and scored.

        Lightning asks twice after a resume; an iteration of which nothing was trained yet is handed out again.
        """
        if self._loader is not None and self.iteration is not None and self.iteration.sampler.consumed == 0:
            return self._loader
        number = self.next_iteration
        self.start(number)
        self.watch, self.collected = Stopwatch(), []
        maker = self.make(number)
        self.iteration = maker(lambda: self._collect(number), self.watch)
        self.next_iteration = number + 1
        self._loader = DataLoader(
            self.iteration.experience,  # type: ignore[arg-type]  # rows become mini-batches on the way
            batch_sampler=self.iteration.sampler,  # type: ignore[arg-type]  # shares, see Experience.__getitems__
            collate_fn=maker.collator,  # type: ignore[arg-type]
        )
        return self._loader

    def _collect(self, number: int) -> list[ScoredSample]:
        """The next batch of samples; asked again where flat groups are replaced."""
        new = self.source.collect(number, self.watch)
        self.collected += new
        return new

    def state_dict(self) -> dict[str, Any]:
        """Iteration to come, position in the prompts, price of KL; whole iterations only."""
        controller = None if self.kl_controller is None else self.kl_controller.state_dict()
        return {
            "next_iteration": self.next_iteration,
            "stream": self.stream.state_dict(),
            "kl_controller": controller,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the iteration after the saved one."""
        self.next_iteration = state["next_iteration"]
        self.stream.load_state_dict(state["stream"])
        if self.kl_controller is not None and state["kl_controller"] is not None:
            self.kl_controller.load_state_dict(state["kl_controller"])
