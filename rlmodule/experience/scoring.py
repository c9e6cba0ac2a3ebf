"""What models say of the samples of an iteration: log-probabilities, values, energies, one pass per model.

Leaves out what is made of them (``advantage_stage.py``) and the plan they are made over (``batching/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.contract import Strategy
from rlmodule.core.types import CRITIC, POLICY, REFERENCE, TEACHER, Sample, TrainingSample
from rlmodule.experience.iteration import Experience
from rlmodule.experience.reference_cache import ReferenceLogprobCache
from rlmodule.experience.timer import Timer


@dataclass(frozen=True)
class ScoringPass:
    """One pass of one model over the samples of an iteration.

    Args:
        phase: under which its seconds are logged.
        model: who is asked.
        fields: field of TrainingSample -> output of the model that fills it.
        options: keywords of the model's forward.
    """

    phase: str
    model: str
    fields: Mapping[str, str]
    options: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Scorer:
    """Asks every model that somebody reads.

    Args:
        strategy: where models and ranks are.
        objective: says which scores the loss needs.
        collator: packs samples.
        device: where forward passes run.
        reference_in_policy: the reference is the policy without its adapter, and no model of its own.
        value_model: name of the model that says values, or None where none does.
        reference_cache: what the reference says of samples that come round again, or None where none does.
    """

    strategy: Strategy
    objective: Objective
    collator: DynamicCollator
    device: torch.device
    reference_in_policy: bool = False
    value_model: str | None = None
    reference_cache: ReferenceLogprobCache | None = None

    def __call__(
        self,
        samples: Mapping[int, Sample],
        sampler: BalancedSampler,
        timer: Timer,
        *,
        with_energy: bool,
        with_next_value: bool,
    ) -> dict[int, TrainingSample]:
        """A row for every sample given, with all that is read of models.

        Args:
            samples: position -> sample.
            sampler: of the iteration.
            timer: takes the time of each pass.
            with_energy: the policy says the energy of each token.
            with_next_value: values are wanted of what would have come after a response that was cut.
        """
        rows = {p: TrainingSample(s, teacher_logprob=s.teacher_logprob) for p, s in samples.items()}
        as_sampled = self._as_sampled(samples)
        for asked in self._passes(self._must_score(samples, as_sampled), with_energy):
            with timer.phase(asked.phase):
                scores = self._kept_or_scored(asked, samples, sampler)
            rows = {
                p: replace(row, **{field: scores[said][p] for field, said in asked.fields.items()})  # type: ignore[arg-type]
                for p, row in rows.items()
            }
        rows |= {p: replace(rows[p], old_logprob=logprob) for p, logprob in as_sampled.items()}
        if with_next_value:
            with timer.phase("value"):
                rows = self._with_next_values(rows, sampler)
        return rows

    def _kept_or_scored(
        self, asked: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """As ``score``; what the reference said of samples that come round again is not asked twice."""
        kept, collectives = self.reference_cache, self.strategy.collectives
        if kept is None or "ref_logprob" not in asked.fields:
            return self.score(asked, samples, sampler)
        known = kept.get(samples, collectives)
        if known is None:
            known = self.score(asked, samples, sampler)["logprob"]
            kept.put(samples, known, collectives)
        return {"logprob": known}

    def _as_sampled(self, samples: Mapping[int, Sample]) -> dict[int, Tensor]:
        """Old log-probabilities that need no pass: those that samples were drawn with, where settings take them."""
        if not (self.objective.needs_old_logprob and self.objective.config.uses_rollout_logprob):
            return {}
        return {p: s.rollout_logprob for p, s in samples.items() if s.rollout_logprob is not None}

    def _must_score(self, samples: Mapping[int, Sample], as_sampled: Mapping[int, Tensor]) -> bool:
        """Whether the policy has to say old log-probabilities; a pass is made by all ranks or by none."""
        wanted = self.objective.config.old_logprob
        if not self.objective.needs_old_logprob or wanted == "rollout":
            return False
        if wanted == "available":
            return not all(self.strategy.collectives.gather_objects(len(as_sampled) == len(samples)))
        return True

    def _passes(self, must_score: bool, with_energy: bool) -> list[ScoringPass]:
        """What is asked of which model; what one model says it says in one pass."""
        passes, of_policy = [], {}
        if must_score:
            of_policy["old_logprob"] = "logprob"
        if self.value_model == POLICY:
            of_policy["old_value"] = "value"
        if with_energy:
            of_policy["energy"] = "energy"
        if of_policy:
            options = {"with_energy": True} if with_energy else {}
            passes.append(ScoringPass("old_logprob", POLICY, of_policy, options))
        if self.value_model == CRITIC:
            passes.append(ScoringPass("value", CRITIC, {"old_value": "value"}))
        if self.objective.needs_reference:
            model, options = (POLICY, {"with_adapter": False}) if self.reference_in_policy else (REFERENCE, {})
            passes.append(ScoringPass("ref_logprob", model, {"ref_logprob": "logprob"}, options))
        if self.objective.config.teacher is not None:
            passes.append(ScoringPass("teacher_logprob", TEACHER, {"teacher_logprob": "logprob"}))
        return passes

    def _with_next_values(self, rows: dict[int, TrainingSample], sampler: BalancedSampler) -> dict[int, TrainingSample]:
        """Rows of responses that were cut, with what is expected of what would have come; a pass over those alone."""
        assert self.value_model is not None, "somebody says values"
        cut = {p: row.sample.extended_by_one() for p, row in rows.items() if row.sample.finish_reason == "length"}
        said = self.score(ScoringPass("value", self.value_model, {"next_value": "value"}), cut, sampler)["value"]
        return rows | {p: replace(rows[p], next_value=float(value[-1])) for p, value in said.items()}

    def experience(self, rows: Mapping[int, TrainingSample], count: int) -> Experience:
        """Rows by position, of an iteration of ``count`` samples over all ranks; the collator's padding fills it up."""
        return Experience(rows, self.collator.pad_token_id, count)

    def score(
        self, asked: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """Output of the model -> position -> [R] of every sample given, over the micro-batches of the first update.

        The same micro-batches give the same rounding, so the first ratio of an update is exactly 1. Tokens without loss
        keep 0. Where rows are cut over ranks, each gets the scores of whole samples. Every rank takes part, also one
        that gives no samples: in a micro-batch without any it runs a dummy.
        """
        count, sequence, forward = len(sampler.metas), self.strategy.sequence, self.strategy.wrapped(asked.model)
        unscored = self.experience({p: TrainingSample(s) for p, s in samples.items()}, count)
        shares = [_share_of_given(share, samples, count) for share in sampler.shares(sampler.first_pass)]
        places = [positions for share in shares for positions in share.micro_batches]
        with self.strategy.eval_mode(asked.model):
            outputs = [
                forward(micro_batch.to(self.device), **asked.options)
                for share in shares
                for micro_batch in self.collator(unscored.__getitems__(share)).micro_batches
            ]
        scores: dict[str, dict[int, Tensor]] = {said: {} for said in asked.fields.values()}
        for said, found in scores.items():
            # After the last pass: reading a result off a device waits for it.
            rows = [getattr(output, said).cpu() for output in outputs]
            for row, positions in zip(rows if sequence is None else sequence.gather_slices(rows), places, strict=True):
                found |= by_sample(row, positions, samples)
        return scores


def _share_of_given(share: RankShare, samples: Mapping[int, Sample], count: int) -> RankShare:
    """Without the positions of samples that are not given; fillers, at positions from ``count`` on, stay."""
    given = tuple(tuple(p for p in step if p in samples or p >= count) for step in share.micro_batches)
    return replace(share, micro_batches=given)


def by_sample(output: Tensor, positions: Sequence[int], samples: Mapping[int, Sample]) -> dict[int, Tensor]:
    """[N] of one micro-batch -> position -> [R]; fillers carry no loss tokens and no position."""
    scores: dict[int, Tensor] = {}
    start = 0
    for position in positions:
        if position not in samples:
            continue
        mask = samples[position].loss_mask
        count = int(mask.sum())
        scores[position] = torch.zeros(len(mask)).masked_scatter_(mask, output[start : start + count])
        start += count
    assert start == len(output), f"{len(output)} numbers for {start} loss tokens"
    return scores
