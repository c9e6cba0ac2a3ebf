"""The LightningDataModule: one epoch is one iteration, so the train loader is made anew each epoch."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch

from rlmodule.algorithm.shaping import KLController
from rlmodule.batching.prefetch import PackedAhead
from rlmodule.core.types import MiniBatch, ScoredSample
from rlmodule.data.stream import PromptStream
from rlmodule.evaluation import Evaluator
from rlmodule.experience.failures import first_failure, num_failed
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.replay import ReplayMemory
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sources import Source
from rlmodule.experience.timer import Timer


class RLDataModule(L.LightningDataModule):
    """Collects samples, makes experience of them, hands out mini-batches.

    Args:
        source: gives this rank's samples.
        stream: the position in the prompts, saved with a checkpoint.
        make: builds the experience maker for one iteration, once the strategy is set up.
        evaluators: on rows that are never trained on; none where nothing is held out.
        kl_controller: the price of KL in the reward, saved with a checkpoint; None where it is not in the reward.
        replay: what is trained on again, saved with a checkpoint by whoever saves what ranks hold.
        start: called when an iteration begins, with its number; for progress displays.
    """

    def __init__(
        self,
        source: Source,
        stream: PromptStream,
        make: Callable[[int], ExperienceMaker],
        *,
        evaluators: Sequence[Evaluator] = (),
        kl_controller: KLController | None = None,
        replay: ReplayMemory | None = None,
        start: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        super().__init__()
        self.source = source
        self.stream = stream
        self.make = make
        self.evaluators = tuple(evaluators)
        self.kl_controller = kl_controller
        self.replay = replay or ReplayMemory(0)
        self.start = start
        self.next_iteration = 0
        self.timer = Timer()
        self.collected: list[ScoredSample] = []  # this rank's samples of the iteration, as sampled
        self.iteration: Iteration | None = None
        self._loader: PackedAhead | None = None
        self._has_warned = False
        self._begun_at = 0  # mini-batches of the iteration that were trained on before this run
        self._pending_partial: list[
            Any
        ] = []  # what the ranks of the saved run held of an iteration that was not finished

    def train_dataloader(self) -> PackedAhead:
        """Samples of the next iteration, planned and scored.

        Lightning asks twice after a resume; an iteration of which nothing was trained yet is handed out again.
        """
        made = self.iteration
        if self._loader is not None and made is not None and made.sampler.consumed == self._begun_at:
            return self._loader
        number = self.next_iteration - bool(self._pending_partial)
        self.start(number)
        self.timer, self.collected = Timer(), []
        maker = self.make(number)
        if self._pending_partial:
            self.iteration = self._restore_partial(maker)
        else:
            self.iteration = maker(lambda: self._collect(number), self.timer)
            self._warn_of_failures(self.iteration.sample_info)
        self.next_iteration = number + 1
        self._begun_at = self.iteration.sampler.consumed
        self._loader = PackedAhead(self.iteration.sampler, partial(maker.packed, self.iteration.experience))
        return self._loader

    def transfer_batch_to_device(self, batch: MiniBatch, device: torch.device, dataloader_idx: int) -> MiniBatch:
        """Copies from page-locked memory run beside the step before; elsewhere they are waited for."""
        return batch.to(device, non_blocking=device.type == "cuda")

    def _collect(self, number: int) -> list[ScoredSample]:
        """The next batch of samples, and what is trained on again; asked again where flat groups are replaced."""
        new = self.source.collect(number, self.timer)
        self.collected += new
        return self.replay.with_earlier(new, number)

    def _warn_of_failures(self, sample_info: Sequence[SampleInfo]) -> None:
        """Say once in a run that the reward function fails on some samples, with the first error."""
        failed = num_failed(sample_info)
        if failed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the reward failed on {failed} of {len(sample_info)} responses; they are unscored and counted in "
                f"reward/failed, and this is not said again. {first_failure(sample_info)}",
                stacklevel=2,
            )

    def partial_state(self) -> bytes | None:
        """This rank's rows and the facts of an iteration that is being trained on; None between iterations."""
        made = self.iteration
        if made is None or not 0 < made.sampler.consumed < len(made.sampler):
            return None
        known = (made.sample_info, made.advantages, dict(made.metrics))
        return pickle.dumps((known, dict(made.experience.rows), made.sampler.state_dict()))

    def load_partial_state(self, payloads: Sequence[bytes]) -> None:
        """Go on with the iteration that all ranks of the saved run have put down; there may be others of them now."""
        self._pending_partial = [pickle.loads(parcel) for parcel in payloads]

    def _restore_partial(self, maker: ExperienceMaker) -> Iteration:
        (sample_info, advantages, metrics), _, state = self._pending_partial[0]
        held = {p: row for _, rows, _ in self._pending_partial for p, row in rows.items()}
        iteration = maker.restored(sample_info, held, advantages, metrics)
        iteration.sampler.load_state_dict(state)
        self._pending_partial = []
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """Iteration to come, position in the prompts, price of KL."""
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
