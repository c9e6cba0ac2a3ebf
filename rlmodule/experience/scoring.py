"""Forward passes over the samples of an iteration: log-probabilities, values and energies, one pass per model.

Leaves out what they are used for (``advantage_stage.py``) and the plan they run over (``batching/``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.row_limit import RowLimit
from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.contract import Strategy
from rlmodule.core.types import (
    CRITIC,
    POLICY,
    REFERENCE,
    TEACHER,
    MicroBatch,
    Sample,
    TokenOutputs,
    TrainingSample,
)
from rlmodule.experience.iteration import Experience
from rlmodule.experience.reference_cache import ReferenceLogprobCache
from rlmodule.experience.timer import Timer


@dataclass(frozen=True, eq=False)
class RowSlice:
    """What a micro-batch is of its row.

    Args:
        width: ranks that share the row.
        places: [N] int64 of each loss token among those of the row; None where it is whole.
    """

    width: int
    places: Tensor | None


def whole_rows(strategy: Strategy, values: Sequence[Tensor], slices: Sequence[RowSlice]) -> list[Tensor]:
    """[n] of each slice -> [N] of its whole row, on every rank that shares it: one exchange for each width."""
    rows = list(values)
    # Groups of a width lie within those of the next one, so that no two wait for each other crosswise.
    for width in sorted({part.width for part in slices} - {1}):
        of_width = [(at, part.places) for at, part in enumerate(slices) if part.width == width]
        sequence = strategy.sequence_of(width)
        assert sequence is not None, "a row of several slices has ranks that share it"
        joined = sequence.gather_slices([rows[at] for at, _ in of_width], [p for _, p in of_width if p is not None])
        for (at, _), row in zip(of_width, joined, strict=True):
            rows[at] = row
    return rows


@dataclass(frozen=True)
class ScoringPass:
    """One pass of one model over the samples of an iteration.

    Args:
        phase: name under which its seconds are logged.
        model: name of the model.
        fields: field of TrainingSample -> output of the model (field of TokenOutputs) that fills it.
        with_adapter: False runs the policy without its LoRA adapter.
    """

    phase: str
    model: str
    fields: Mapping[str, str]
    with_adapter: bool = True


@dataclass(frozen=True)
class Scorer:
    """Runs every model whose outputs the loss or the advantage needs.

    Args:
        strategy: runs the models.
        objective: says which scores the loss needs.
        collator: packs samples.
        device: where forward passes run.
        reference_in_policy: the reference is the policy without its adapter, and no model of its own.
        value_model: name of the model that gives values; None where there is no value function.
        reference_cache: reference log-probabilities of samples that are trained on again; None where none are.
        row_limit: cuts rows that do not fit in memory.
    """

    strategy: Strategy
    objective: Objective
    collator: DynamicCollator
    device: torch.device
    reference_in_policy: bool = False
    value_model: str | None = None
    reference_cache: ReferenceLogprobCache | None = None
    row_limit: RowLimit = field(default_factory=RowLimit)

    def __call__(
        self,
        samples: Mapping[int, Sample],
        sampler: BalancedSampler,
        timer: Timer,
        *,
        with_energy: bool,
        with_next_value: bool,
    ) -> dict[int, TrainingSample]:
        """The samples with every score that the loss or the advantage reads.

        Args:
            samples: position -> sample.
            sampler: of the iteration.
            timer: takes the time of each pass.
            with_energy: add the energy of each token.
            with_next_value: add the bootstrap value of responses that were cut.
        """
        rows = {p: TrainingSample(s, teacher_logprob=s.teacher_logprob) for p, s in samples.items()}
        as_sampled = self._as_sampled(samples)
        for one in self._passes(self._must_score(samples, as_sampled, len(sampler.plans)), with_energy):
            with timer.phase(one.phase):
                scores = self._cached_or_scored(one, samples, sampler)
            rows = {
                p: replace(row, **{field: scores[output][p] for field, output in one.fields.items()})  # type: ignore[arg-type]
                for p, row in rows.items()
            }
        rows |= {p: replace(rows[p], old_logprob=logprob) for p, logprob in as_sampled.items()}
        if with_next_value:
            with timer.phase("value"):
                rows = self._with_next_values(rows, sampler)
        return rows

    def _cached_or_scored(
        self, one: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """Like ``score``, but takes reference log-probabilities from the cache for samples seen before."""
        cache, collectives = self.reference_cache, self.strategy.collectives
        if cache is None or "ref_logprob" not in one.fields:
            return self.score(one, samples, sampler)
        known = cache.get(samples, collectives)
        if known is None:
            known = self.score(one, samples, sampler)["logprob"]
            cache.put(samples, known, collectives)
        return {"logprob": known}

    def _as_sampled(self, samples: Mapping[int, Sample]) -> dict[int, Tensor]:
        """Old log-probabilities that need no pass: those the samples were drawn with, where the settings use them."""
        if not (self.objective.needs_old_logprob and self.objective.config.uses_rollout_logprob):
            return {}
        return {p: s.rollout_logprob for p, s in samples.items() if s.rollout_logprob is not None}

    def _must_score(self, samples: Mapping[int, Sample], as_sampled: Mapping[int, Tensor], steps: int) -> bool:
        """Whether the policy computes old log-probabilities; all ranks decide alike."""
        if self.objective.scores_old_logprob(steps) and self.objective.config.old_logprob == "available":
            return not all(self.strategy.collectives.gather_objects(len(as_sampled) == len(samples)))
        return self.objective.scores_old_logprob(steps)

    def _passes(self, must_score: bool, with_energy: bool) -> list[ScoringPass]:
        """The forward passes to run: one per model, with all the outputs wanted from it."""
        passes, of_policy = [], {}
        if must_score:
            of_policy["old_logprob"] = "logprob"
        if self.value_model == POLICY:
            of_policy["old_value"] = "value"
        if with_energy:
            of_policy["energy"] = "energy"
        if of_policy:
            passes.append(ScoringPass("old_logprob", POLICY, of_policy))
        if self.value_model == CRITIC:
            passes.append(ScoringPass("value", CRITIC, {"old_value": "value"}))
        if self.objective.needs_reference:
            model = POLICY if self.reference_in_policy else REFERENCE
            of_reference = {"ref_logprob": "logprob"}
            passes.append(ScoringPass("ref_logprob", model, of_reference, with_adapter=not self.reference_in_policy))
        if self.objective.config.teacher is not None:
            of_teacher = {"teacher_logprob": "logprob"} if self.objective.needs("teacher_logprob") else {}
            if self.objective.num_top_tokens:
                of_teacher |= {"teacher_top_ids": "top_ids", "teacher_top_logprob": "top_logprob"}
            passes.append(ScoringPass("teacher_logprob", TEACHER, of_teacher))
        return passes

    def _with_next_values(self, rows: dict[int, TrainingSample], sampler: BalancedSampler) -> dict[int, TrainingSample]:
        """Adds the bootstrap value to truncated responses, by one pass over those alone."""
        assert self.value_model is not None, "bootstrap values need a value function"
        cut = {p: row.sample.extended_by_one() for p, row in rows.items() if row.sample.finish_reason == "length"}
        values = self.score(ScoringPass("value", self.value_model, {"next_value": "value"}), cut, sampler)["value"]
        return rows | {p: replace(rows[p], next_value=float(value[-1])) for p, value in values.items()}

    def experience(self, rows: Mapping[int, TrainingSample], count: int) -> Experience:
        """This rank's part of an iteration of ``count`` samples: rows by position, padded with the collator's id."""
        return Experience(rows, self.collator.pad_token_id, count)

    def score(
        self, one: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """Output of the model -> position -> [R] of every sample given, over the micro-batches of the first update.

        The same micro-batches give the same rounding, so the first ratio of an update is exactly 1. Tokens without loss
        keep 0. Where rows are cut over ranks, each gets the scores of whole samples. Every rank takes part, also one
        that gives no samples: it runs dummy micro-batches.
        """
        count, outputs = len(sampler.metas), frozenset(one.fields.values())
        shares = [_share_of_given(share, samples, count) for share in sampler.shares(sampler.first_pass)]
        slices: list[RowSlice] = []
        experience = self.experience({p: TrainingSample(s) for p, s in samples.items()}, count)
        batches = self._packed(experience, shares, slices)
        found = self.row_limit.forward(self.strategy, one.model, batches, outputs, with_adapter=one.with_adapter)
        positions = [step for share in shares for step in share.micro_batches]
        scores: dict[str, dict[int, Tensor]] = {output: {} for output in one.fields.values()}
        for output, by_position in scores.items():
            for row, step in zip(self._whole_rows(found, slices, output), positions, strict=True):
                by_position |= by_sample(row, step, samples)
        return scores

    def _packed(
        self, experience: Experience, shares: Sequence[RankShare], slices: list[RowSlice]
    ) -> Iterator[MicroBatch]:
        """Every micro-batch on the device, packed one mini-batch at a time and moved when it is due.

        ``slices`` is given what each of them is of its row.
        """
        for share in shares:
            for micro_batch in self.collator(experience.__getitems__(share)).micro_batches:
                slices.append(RowSlice(micro_batch.width, micro_batch.places))
                yield micro_batch.to(self.device)

    def _whole_rows(self, found: Sequence[TokenOutputs], slices: Sequence[RowSlice], output: str) -> list[Tensor]:
        """[N] on the CPU of each micro-batch's whole row, also where ranks hold slices of it."""
        # After the last pass: reading a result off a device waits for it.
        return whole_rows(self.strategy, [outputs[output].cpu() for outputs in found], slices)


def _share_of_given(share: RankShare, samples: Mapping[int, Sample], count: int) -> RankShare:
    """Without the positions of samples that are not given; padding samples, at positions from ``count`` on, stay."""
    given = tuple(tuple(p for p in step if p in samples or p >= count) for step in share.micro_batches)
    return replace(share, micro_batches=given)


def by_sample(output: Tensor, positions: Sequence[int], samples: Mapping[int, Sample]) -> dict[int, Tensor]:
    """[N, ...] of one micro-batch -> position -> [R, ...]; padding samples have neither loss tokens nor a position."""
    scores: dict[int, Tensor] = {}
    start = 0
    for position in positions:
        if position not in samples:
            continue
        mask = samples[position].loss_mask
        count = int(mask.sum())
        scores[position] = output.new_zeros(len(mask), *output.shape[1:])
        scores[position][mask] = output[start : start + count]
        start += count
    assert start == len(output), f"{len(output)} numbers for {start} loss tokens"
    return scores
