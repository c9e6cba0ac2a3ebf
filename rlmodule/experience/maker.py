"""Scored responses of all ranks -> one iteration that is ready to train on; reads as the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.contract import Advantage, Strategy
from rlmodule.core.types import ExperienceRow, MiniBatch, SampleMeta, ScoredSample
from rlmodule.experience.collecting import collect_groups
from rlmodule.experience.correction import corrected
from rlmodule.experience.estimation import Estimation, means, with_advantages
from rlmodule.experience.facts import SampleFacts
from rlmodule.experience.iteration import Experience, Iteration
from rlmodule.experience.moving import move
from rlmodule.experience.reference_scores import ReferenceScores
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.stopwatch import Stopwatch
from rlmodule.objective import Objective
from rlmodule.shaping import KLController


@dataclass(frozen=True)
class ExperienceMaker:
    """Turns the responses of all ranks into an Iteration.

    Args:
        strategy: where models and ranks are.
        objective: says which scores the loss needs.
        advantage: estimator, or None where the loss needs none.
        collator: packs samples for the scoring passes.
        make_sampler: metas of the iteration -> its sampler.
        device: where forward passes run.
        reference_in_policy: the reference is the policy without its adapter, and no model of its own.
        kl_controller: the price of KL in the reward, or None where it is not in the reward.
        value_model: name of the model that says values, or None where none does.
        reference_scores: what the reference says of samples that come round again, or None where none does.
    """

    strategy: Strategy
    objective: Objective
    advantage: Advantage | None
    collator: DynamicCollator
    make_sampler: Callable[[Sequence[SampleMeta]], BalancedSampler]
    device: torch.device
    reference_in_policy: bool = False
    kl_controller: KLController | None = None
    value_model: str | None = None
    reference_scores: ReferenceScores | None = None

    def __call__(self, collect: Callable[[], list[ScoredSample]], watch: Stopwatch) -> Iteration:
        """Run every stage; ``collect`` gives this rank's responses and may fail, which then every rank learns."""
        collectives, layout, estimation = self.strategy.collectives, self.strategy.layout, self._estimation
        mine, facts, metrics = collect_groups(collect, self.objective, collectives)
        # Values, energies and KL come from passes over the plan; without them advantages are known before it is made.
        needs_scores = self.kl_controller is not None or self.value_model is not None or estimation.needs_energy
        inputs = None if needs_scores else estimation.inputs(facts, {}, metrics)
        advantages = estimation.advantages(inputs)
        with watch.phase("plan"):
            sampler = self.make_sampler(self._metas(facts, advantages))
        position = {f.meta.sample_id: i for i, f in enumerate(facts)}
        with watch.phase("exchange"):
            first = sampler.owners(sampler.first_pass)
            held = move({position[s.sample_id]: s for s in mine}, first, layout, collectives)
        rows = self._scorer(held, sampler, watch)
        rows = corrected(rows, self.objective.settings.rollout_correction, collectives, metrics)
        if needs_scores:
            inputs = estimation.inputs(facts, rows, metrics)
            advantages = estimation.advantages(inputs)
        rows = estimation.with_returns(rows, inputs, metrics)
        rows = with_advantages(rows, advantages)
        if len(sampler.plans) > len(sampler.first_pass):
            with watch.phase("exchange"):
                rows = move(rows, sampler.owners(sampler.plans), layout, collectives)
        experience = Experience(rows, self.collator.pad_token_id, len(facts))
        return Iteration(facts, means(advantages), experience, sampler, metrics)

    @property
    def _estimation(self) -> Estimation:
        return Estimation(self.objective, self.advantage, self.kl_controller, self.strategy.collectives)

    @property
    def _scorer(self) -> Scorer:
        return Scorer(
            self.strategy,
            self.objective,
            self.collator,
            self.device,
            self.reference_in_policy,
            self.value_model,
            self.reference_scores,
            with_energy=self._estimation.needs_energy,
            with_next_value=self._estimation.needs_next_value,
        )

    def _metas(self, facts: Sequence[SampleFacts], advantages: Sequence[Tensor] | None) -> list[SampleMeta]:
        """What is planned: samples that cannot change the gradient are marked to be left out."""
        has_gradient = [f.meta.loss_tokens > 0 for f in facts]
        if advantages is not None and self.objective.ignores_zero_advantage:
            # As float32, in which the loss sees them.
            has_gradient = [a and bool((b.float() != 0).any()) for a, b in zip(has_gradient, advantages, strict=True)]
        return [replace(f.meta, is_left_out=not has) for f, has in zip(facts, has_gradient, strict=True)]

    def restored(
        self,
        facts: Sequence[SampleFacts],
        held: Mapping[int, ExperienceRow],
        advantages: Tensor | None,
        metrics: Mapping[str, float],
    ) -> Iteration:
        """An iteration that a checkpoint interrupted, from the rows of all its ranks; nothing is scored anew."""
        # What no rank holds was left out of the plan, and is again.
        sampler = self.make_sampler([replace(f.meta, is_left_out=p not in held) for p, f in enumerate(facts)])
        owners = sampler.owners(sampler.plans)
        mine = {p: row for p, row in held.items() if self.strategy.layout.dp_rank in owners.get(p, ())}
        return Iteration(facts, advantages, Experience(mine, self.collator.pad_token_id, len(facts)), sampler, metrics)

    def packed(self, experience: Experience, share: RankShare) -> MiniBatch:
        """One mini-batch on the host, where copies to a CUDA device do not wait for it."""
        mini_batch = self.collator(experience.__getitems__(share))
        if self.device.type != "cuda":
            return mini_batch
        with torch.cuda.device(self.device):  # page-locked memory belongs to a device, threads start with the first
            return mini_batch.pin_memory()
