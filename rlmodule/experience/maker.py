"""Scored responses of all ranks -> one iteration that is ready to train on; reads as the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import MiniBatch, SampleMeta, ScoredSample, TrainingSample
from rlmodule.experience.advantage_stage import AdvantageStage, PerResponse, with_advantages
from rlmodule.experience.collect import collect_groups
from rlmodule.experience.correction import compared, recounted, without_rejected, without_rejected_rewards
from rlmodule.experience.drawn_tokens import DrawnCheck
from rlmodule.experience.iteration import Experience, Iteration
from rlmodule.experience.iteration_state import SavedIteration
from rlmodule.experience.redistribute import all_gather_dict, redistribute, spoken_for
from rlmodule.experience.sample_table import SampleTable
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer


@dataclass(frozen=True)
class ExperienceMaker:
    """Turns the responses of all ranks into an Iteration.

    Args:
        scorer: asks the models.
        advantage_stage: makes advantages of what they say.
        make_sampler: metas of the iteration -> its sampler.
        check_drawn: refuses responses that are not the policy's; None believes them.
    """

    scorer: Scorer
    advantage_stage: AdvantageStage
    make_sampler: Callable[[Sequence[SampleMeta]], BalancedSampler]
    check_drawn: DrawnCheck | None = None

    def __call__(self, collect: Callable[[], list[ScoredSample]], timer: Timer) -> Iteration:
        """Run every stage; ``collect`` gives this rank's responses and may fail, which then every rank learns."""
        scorer, advantage_stage = self.scorer, self.advantage_stage
        objective, layout, collectives = scorer.objective, scorer.strategy.layout, scorer.strategy.collectives
        collected = collect_groups(collect, objective, collectives)
        sample_info, metrics = collected.sample_info, collected.metrics
        # Values, energies and KL come from passes over the plan; without them advantages are known before it is made.
        inputs = None if self._needs_scores else advantage_stage.inputs(sample_info, {}, metrics)
        advantages = advantage_stage.advantages(inputs)
        with timer.phase("plan"):
            sampler = self.make_sampler(self._metas(sample_info, advantages))
        with timer.phase("exchange"):
            positions = sample_info.positions_of(s.sample_id for s in collected.mine)
            here = dict(zip(positions, collected.mine, strict=True))
            held = redistribute(here, sampler.owners(sampler.first_pass, here), layout, collectives)
        speakers = sampler.speakers(sampler.first_pass, held)
        rows = scorer(
            held,
            sampler,
            timer,
            with_energy=advantage_stage.needs_energy,
            with_next_value=advantage_stage.needs_next_value,
        )
        if self.check_drawn is not None:
            self.check_drawn(spoken_for(rows, speakers, layout))
        rows, kept = compared(rows, spoken_for(rows, speakers, layout), objective.config, collectives, metrics)
        if self._needs_scores:
            counted = without_rejected_rewards(sample_info, kept, collectives) if self._rejects else sample_info
            inputs = advantage_stage.inputs(counted, rows, metrics)
            advantages = advantage_stage.advantages(inputs)
        rows = advantage_stage.with_returns(rows, inputs, metrics)
        rows = with_advantages(rows, advantages)
        if self._rejects:
            rows = without_rejected(rows, kept)
            self._recount(sampler, sample_info, all_gather_dict(self._recounted(sample_info, rows), collectives))
        if len(sampler.plans) > len(sampler.first_pass):
            with timer.phase("exchange"):
                once = spoken_for(rows, speakers, layout)
                rows = redistribute(once, sampler.owners(sampler.plans, once), layout, collectives)
        return Iteration(
            sample_info,
            None if advantages is None else advantages.means,
            scorer.experience(rows, len(sample_info)),
            sampler,
            metrics,
            collected.left_out,
        )

    @property
    def _rejects(self) -> bool:
        return self.scorer.objective.config.rollout_rejection.is_on

    @property
    def _needs_scores(self) -> bool:
        """Whether models are asked before there are advantages; then no sample is left out of the plan for its own."""
        return self.scorer.value_model is not None or self.advantage_stage.needs_scores or self._rejects

    def _recounted(self, info: SampleTable, rows: Mapping[int, TrainingSample]) -> dict[int, SampleMeta]:
        # A value function learns from a sample whatever its advantage.
        by_advantage = self.scorer.value_model is None and self.scorer.objective.no_gradient_at_zero_advantage
        return recounted(info, rows, needs_advantage=by_advantage)

    def _recount(self, sampler: BalancedSampler, sample_info: SampleTable, metas: Mapping[int, SampleMeta]) -> None:
        """Take the totals of every mini-batch from the loss tokens that are left."""
        sampler.recount([metas.get(p, replace(meta, has_gradient=False)) for p, meta in enumerate(sample_info.metas)])

    def _metas(self, sample_info: SampleTable, advantages: PerResponse | None) -> SampleMetas:
        """What is planned: samples without a gradient are marked, and left out where the config says so."""
        objective, metas = self.scorer.objective, sample_info.metas
        is_zero = np.zeros(len(metas), bool) if advantages is None else advantages.is_zero.numpy()
        has_loss = metas.loss_tokens > 0
        return replace(
            metas,
            is_skipped=~has_loss | (is_zero & objective.ignores_zero_advantage),
            has_gradient=has_loss & ~(is_zero & objective.no_gradient_at_zero_advantage),
        )

    def resumed(self, saved: SavedIteration) -> Iteration:
        """An iteration that a checkpoint interrupted, from the rows of all its ranks; nothing is scored anew."""
        info = saved.sample_info
        # Advantages that needed a plan first had no say in it, and have none now.
        values = saved.advantages
        known = None if self._needs_scores or values is None else PerResponse(values)
        metas = self._metas(info, known)
        # What no rank holds was left out of the plan, and is again.
        is_held = np.isin(np.arange(len(info)), list(saved.rows))
        sampler = self.make_sampler(replace(metas, is_skipped=~is_held))
        if self._rejects:
            self._recount(sampler, info, self._recounted(info, saved.rows))
        sampler.load_state_dict(saved.sampler)
        owners = sampler.owners(sampler.plans, saved.rows)
        mine = {p: row for p, row in saved.rows.items() if self.scorer.strategy.layout.dp_rank in owners.get(p, ())}
        experience = self.scorer.experience(mine, len(info))
        return Iteration(info, saved.advantages, experience, sampler, saved.metrics, saved.left_out)

    def packed(self, experience: Experience, share: RankShare) -> MiniBatch:
        """One mini-batch on the host, where copies to a CUDA device do not wait for it."""
        mini_batch, device = self.scorer.collator(experience.__getitems__(share)), self.scorer.device
        if device.type != "cuda":
            return mini_batch
        with torch.cuda.device(device):  # page-locked memory belongs to a device, threads start with the first
            return mini_batch.pin_memory()
