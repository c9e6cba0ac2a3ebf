"""The LightningDataModule: one epoch is one iteration, so a new train loader is built each epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from rlmodule.batching.prefetch import PackedAhead
from rlmodule.core.contract import Evaluator
from rlmodule.core.errors import EnginesGoneError
from rlmodule.core.types import MiniBatch, ScoredSample
from rlmodule.experience.failures import first_failure, num_failed
from rlmodule.experience.in_flight import InFlight
from rlmodule.experience.iteration import Iteration
from rlmodule.experience.iteration_metrics import without_padding
from rlmodule.experience.iteration_state import SavedIteration, iteration_state
from rlmodule.experience.ledger import Ledger
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.replay import ReplayMemory
from rlmodule.experience.sample_table import SampleTable
from rlmodule.experience.sources import Source
from rlmodule.experience.timer import Timer

if TYPE_CHECKING:  # types alone
    from rlmodule.algorithm.shaping import KLController
    from rlmodule.checkpoint.samples import PlainState
    from rlmodule.data.stream import PromptStream
    from rlmodule.training.update import StepResult

NEARLY_ALL = 0.95  # share of an iteration's responses


class RLDataModule(L.LightningDataModule):
    """Collects samples, turns them into experience, yields mini-batches.

    Args:
        source: gives this rank's samples.
        stream: order of the rows and position in it, saved with a checkpoint.
        make: builds the experience maker of one iteration, once the strategy is set up.
        evaluators: evaluate on held-out rows; empty if there are none.
        kl_controller: coefficient of the KL in the reward, saved with a checkpoint; None without KL in the reward.
        replay: samples that are trained on again; the checkpoint callback saves them.
        ledger: counts what becomes of every sample of the stream; None counts nothing.
        in_flight: rows whose episodes run beside training; it saves those too.
        engine: samples responses, closed by ``close``; None where nothing is sampled.
        start: called with the number of an iteration (from 0) when it begins.
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
        ledger: Ledger | None = None,
        in_flight: InFlight | None = None,
        engine: LiveEngine | None = None,
        start: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        super().__init__()
        self.source = source
        self.stream = stream
        self.make = make
        self.evaluators = tuple(evaluators)
        self.kl_controller = kl_controller
        self.replay = replay or ReplayMemory(0)
        self.in_flight = in_flight or InFlight(stream)
        self.engine = engine
        self.start = start
        self.next_iteration = 0
        self.timer = Timer()
        self.collected: list[ScoredSample] = []  # this rank's samples of the iteration, as sampled
        self.iteration: Iteration | None = None
        self._loader: PackedAhead | None = None
        self._warned_of_cuts = False
        self._warned_of_failures = False
        self.ledger = ledger
        self._skipped: set[int] = set()  # mini-batches of the iteration whose optimizer step was not taken
        self._is_settled = True  # whether the iteration is in the ledger
        self._begun_at = 0  # mini-batches of the iteration that were trained on before this run
        self._pending_partial: SavedIteration | None = None  # of the checkpoint that the run goes on from

    def train_dataloader(self) -> PackedAhead:
        """Collect, plan and score the samples of the next iteration.

        Lightning calls this twice after a resume; an iteration of which nothing was trained yet is returned again.
        """
        made = self.iteration
        if self._loader is not None and made is not None and made.sampler.consumed == self._begun_at:
            return self._loader
        self._settle()
        is_resumed = self._pending_partial is not None
        number = self.next_iteration - is_resumed
        self.start(number)
        self.timer, self.collected = Timer(), []
        maker = self.make(number)
        if self._pending_partial is not None:
            self._skipped = set(self._pending_partial.skipped)
            self.iteration, self._pending_partial = maker.resumed(self._pending_partial), None
        else:
            self._skipped = set()
            self.iteration = self._made(maker, number)
        self._is_settled = not self._counts(self.iteration, is_resumed=is_resumed)
        self.next_iteration = number + 1
        self._begun_at = self.iteration.sampler.consumed
        self._loader = PackedAhead(self.iteration.sampler, partial(maker.packed, self.iteration.experience))
        return self._loader

    def _made(self, maker: ExperienceMaker, number: int) -> Iteration:
        """An iteration of new samples."""
        place = self.in_flight.place
        try:
            iteration = maker(lambda: self._collect(number), self.timer)
        except EnginesGoneError:
            self.in_flight.abandon(place)  # its rows are taken again by the run that goes on
            self.replay.forget(number)
            raise
        self._warn_if_cut(iteration, number)
        self._warn_of_failures(iteration.sample_info)
        return iteration

    def count_step(self, result: StepResult) -> None:
        """Note what became of a mini-batch of the iteration; for ``RLModule.after_step``."""
        assert self.iteration is not None, "a step trains on an iteration"
        if not result.stepped:
            self._skipped.add(self.iteration.sampler.consumed - 1)

    def _counts(self, iteration: Iteration, *, is_resumed: bool) -> bool:
        """Check the samples of an iteration that begins; whether they will be entered into the ledger."""
        if self.ledger is None:
            return False
        rows = self.in_flight.first_row
        if is_resumed and self.ledger.rows is None:  # its checkpoint knows nothing of the samples that it left out
            self.ledger.rows = rows
            return False
        self.ledger.check(iteration, rows, is_resumed=is_resumed)
        return True

    def _settle(self) -> None:
        """Enter the iteration into the ledger of samples once all of it was trained on."""
        made = self.iteration
        if self.ledger is None or self._is_settled or made is None:
            return
        if made.sampler.consumed >= len(made.sampler):
            self.ledger.settle(made, self.in_flight.first_row, self._skipped)
            self._is_settled = True

    def ledger_metrics(self) -> dict[str, float]:
        """``samples/*`` of the run so far; at the end of an iteration with those that it has trained on.

        Raises:
            TrainingError: on every rank, when a sample was lost or counted twice.
        """
        self._settle()
        return {} if self.ledger is None else self.ledger.metrics(self.stream.consumed)

    def transfer_batch_to_device(self, batch: MiniBatch, device: torch.device, dataloader_idx: int) -> MiniBatch:
        # Copies from page-locked memory run while the step before is computed.
        return batch.to(device, non_blocking=device.type == "cuda")

    def _collect(self, number: int) -> list[ScoredSample]:
        """New samples and those that are trained on again; called once more for each round of ``filter_groups``."""
        new = self.source.collect(number, self.timer)
        self.collected += new
        return self.replay.with_earlier(new, number)

    def _warn_if_cut(self, iteration: Iteration, number: int) -> None:
        """Say once that hardly any response ends by itself: with the wrong end tokens a run learns nothing."""
        counted = without_padding(iteration.sample_info)
        cut = int(counted.truncated.sum())
        if self._warned_of_cuts or not self.source.is_fresh or not counted or cut < NEARLY_ALL * len(counted):
            return
        self._warned_of_cuts = True
        if self.trainer is None or self.trainer.is_global_zero:
            warnings.warn(
                f"nearly all responses of iteration {number + 1} ({cut} of {len(counted)}) were cut at "
                "rollout.max_response_length. Raise it, or name the tokens that the model ends its turns with in "
                "rollout.stop_token_ids or rollout.stop; the run's plan says which are known",
                stacklevel=2,
            )

    @property
    def policy_version(self) -> int:
        """Iterations that the policy has been trained on, one under way included."""
        made = self.iteration
        is_untouched = made is not None and made.sampler.consumed == 0
        return self.next_iteration - is_untouched

    def close(self) -> None:
        """Close the rollout engine; at the end of a run, also after an error."""
        if self.engine is not None:
            self.engine.close()
        self.in_flight.close()

    def _warn_of_failures(self, sample_info: SampleTable) -> None:
        """Say once in a run that the reward function fails on some samples, with the first error."""
        failed = num_failed(sample_info)
        if failed and not self._warned_of_failures:
            self._warned_of_failures = True
            warnings.warn(
                f"the reward failed on {failed} of {len(sample_info)} responses; they are unscored and counted in "
                f"reward/failed, and this is not said again. {first_failure(sample_info)}",
                stacklevel=2,
            )

    def partial_state(self) -> tuple[PlainState, PlainState] | None:
        """(what all ranks know, what this rank holds) of an iteration being trained on; None between iterations."""
        made = self.iteration
        if made is None or not 0 < made.sampler.consumed < len(made.sampler):
            return None
        return iteration_state(made, self._skipped)

    def load_partial_state(self, shared: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """Restore an unfinished iteration from all saved ranks; the number of ranks may differ."""
        self._pending_partial = SavedIteration.from_state(shared, ranks)

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        controller = None if self.kl_controller is None else self.kl_controller.state_dict()
        return {
            "next_iteration": self.next_iteration,
            "stream": self.in_flight.place,
            "ledger": None if self.ledger is None else self.ledger.state_dict(),
            "kl_controller": controller,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_iteration = state["next_iteration"]
        self.stream.load_state_dict(state["stream"])
        if self.ledger is not None:
            self.ledger.load_state_dict(state.get("ledger"))
        if self.kl_controller is not None and state["kl_controller"] is not None:
            self.kl_controller.load_state_dict(state["kl_controller"])
