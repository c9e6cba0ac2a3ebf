"""Scored responses -> rows ready to train on: facts gathered, step planned, samples moved, scores and advantages added.

Facts are lengths and rewards, never tokens: they are gathered once, and everything that must be the same on every rank
(order, plan, advantages, logged rewards) is computed from them on every rank alike. Tokens travel once, to the rank
that trains on them. Leaves out where responses come from (``sources.py``) and how rows are trained on (``update.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rlmodule.batching.collate import DynamicCollator, filler_row
from rlmodule.batching.sampler import BalancedSampler, RankShare
from rlmodule.core.contract import Advantage, Collectives, Strategy
from rlmodule.core.errors import RLModuleError, TrainingError
from rlmodule.core.types import AdvantageInputs, ExperienceRow, Sample, SampleMeta, ScoredSample
from rlmodule.objective import Objective

T = TypeVar("T")


@dataclass
class Stopwatch:
    """Seconds of wall clock by phase, on this rank."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``name``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


@dataclass(frozen=True)
class SampleFacts:
    """What every rank gets to know of a sample.

    Args:
        meta: ids and lengths.
        reward: None when it could not be scored.
        parts: named components of the reward.
        truncated: whether the response was cut at the limit.
    """

    meta: SampleMeta
    reward: float | None
    parts: Mapping[str, float]
    truncated: bool


class Experience(Dataset[ExperienceRow]):
    """This rank's rows of one iteration, by their place in the iteration.

    Args:
        rows: position -> row, for the positions this rank trains on.
        pad_token_id: id in filler rows, which stand at positions no sample has.
        num_samples: samples of the iteration over all ranks.
    """

    def __init__(self, rows: Mapping[int, ExperienceRow], pad_token_id: int, num_samples: int) -> None:
        self.rows = rows
        self.pad_token_id = pad_token_id
        self.num_samples = num_samples

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> ExperienceRow:
        return filler_row(self.pad_token_id) if position >= self.num_samples else self.rows[position]

    def __getitems__(self, share: RankShare) -> tuple[RankShare, list[list[ExperienceRow]]]:
        """The rows of one mini-batch, by micro-batch; torch's DataLoader hands over whatever the batch sampler gave."""
        return share, [[self[p] for p in step] for step in share.micro_batches]


@dataclass(frozen=True)
class Iteration:
    """One iteration, ready to train on.

    Args:
        facts: every sample of the iteration over all ranks, by sample id.
        advantages: [B] float64 over ``facts``, or None where the loss needs none.
        experience: this rank's rows.
        sampler: hands out this rank's mini-batches.
    """

    facts: Sequence[SampleFacts]
    advantages: Tensor | None
    experience: Experience
    sampler: BalancedSampler


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
    """

    strategy: Strategy
    objective: Objective
    advantage: Advantage | None
    collator: DynamicCollator
    make_sampler: Callable[[Sequence[SampleMeta]], BalancedSampler]
    device: torch.device

    def __call__(self, collect: Callable[[], list[ScoredSample]], watch: Stopwatch) -> Iteration:
        """Run every stage; ``collect`` gives this rank's responses and may fail, which then every rank learns."""
        collectives, dp_size = self.strategy.collectives, self.strategy.layout.dp_size
        mine, facts = gather_facts(collect, collectives)
        advantages = self._advantages(facts) if self.objective.needs("advantage") else None
        with watch.phase("plan"):
            sampler = self.make_sampler([f.meta for f in facts])
        position = {f.meta.sample_id: i for i, f in enumerate(facts)}
        with watch.phase("exchange"):
            first = sampler.owners(sampler.first_epoch)
            held = _move({position[s.sample_id]: s for s in mine}, first, dp_size, collectives)
        rows = self._rows(held, advantages, sampler, watch)
        if len(sampler.plans) > len(sampler.first_epoch):
            with watch.phase("exchange"):
                everyone = sampler.owners(sampler.plans)
                rows = _move(rows, everyone, dp_size, collectives)
        return Iteration(facts, advantages, Experience(rows, self.collator.pad_token_id, len(facts)), sampler)

    def _advantages(self, facts: Sequence[SampleFacts]) -> Tensor:
        assert self.advantage is not None, "this loss needs an advantage estimator"
        return self.advantage(
            AdvantageInputs(
                reward=torch.tensor([math.nan if f.reward is None else f.reward for f in facts], dtype=torch.float64),
                group=torch.tensor([f.meta.group_id for f in facts]),
                loss_tokens=torch.tensor([f.meta.loss_tokens for f in facts]),
            )
        )

    def _rows(
        self, samples: Mapping[int, Sample], advantages: Tensor | None, sampler: BalancedSampler, watch: Stopwatch
    ) -> dict[int, ExperienceRow]:
        rows = {p: ExperienceRow(sample) for p, sample in samples.items()}
        if advantages is not None:
            rows = {
                p: replace(row, advantage=torch.full((len(row.sample.response_ids),), float(advantages[p])))
                for p, row in rows.items()
            }
        if self.objective.needs("old_logprob"):
            with watch.phase("old_logprob"):
                scores = self.score("policy", samples, sampler)
                rows = {p: replace(row, old_logprob=scores[p]) for p, row in rows.items()}
        if self.objective.needs_reference:
            with watch.phase("ref_logprob"):
                scores = self.score("reference", samples, sampler)
                rows = {p: replace(row, ref_logprob=scores[p]) for p, row in rows.items()}
        return rows

    def score(self, model: str, samples: Mapping[int, Sample], sampler: BalancedSampler) -> dict[int, Tensor]:
        """Log-probabilities [R] of every sample held here, over the micro-batches the first update will run.

        The same micro-batches give the same rounding, so the first ratio of an update is exactly 1. Tokens without loss
        keep 0.
        """
        unscored = Experience(
            {p: ExperienceRow(s) for p, s in samples.items()}, self.collator.pad_token_id, len(sampler.metas)
        )
        scores: dict[int, Tensor] = {}
        forward = self.strategy.wrapped(model)
        with self.strategy.eval_mode(model):
            for share in sampler.shares(sampler.first_epoch):
                mini_batch = self.collator(unscored.__getitems__(share))
                for micro_batch, positions in zip(mini_batch.micro_batches, share.micro_batches, strict=True):
                    logprob = forward(micro_batch.to(self.device)).logprob.cpu()
                    scores.update(_by_sample(logprob, positions, samples))
        return scores


def gather_facts(
    collect: Callable[[], list[ScoredSample]], collectives: Collectives
) -> tuple[list[Sample], list[SampleFacts]]:
    """(this rank's samples, facts of every rank's by sample id). Unscored samples lose their loss tokens.

    Raises:
        TrainingError: on every rank, when collecting failed on any.
    """
    try:
        scored, failure = [_without_loss_if_unscored(s) for s in collect()], None
    except RLModuleError as error:
        scored, failure = [], error
    facts = [
        SampleFacts(s.sample.meta, s.score.value, dict(s.score.parts), s.sample.finish == "length") for s in scored
    ]
    everyone = collectives.gather_objects((facts, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise TrainingError(f"data rank {rank} could not collect its responses: {reason}")
    return [s.sample for s in scored], sorted((f for part, _ in everyone for f in part), key=lambda f: f.meta.sample_id)


def _without_loss_if_unscored(scored: ScoredSample) -> ScoredSample:
    if scored.score.value is not None:
        return scored
    return replace(scored, sample=replace(scored.sample, loss_mask=torch.zeros_like(scored.sample.loss_mask)))


def _move(
    held: Mapping[int, T], owners: Mapping[int, Iterable[int]], dp_size: int, collectives: Collectives
) -> dict[int, T]:
    """Send every held item to the data ranks that own its position; returns what this rank owns."""
    outgoing: list[dict[int, T]] = [{} for _ in range(dp_size)]
    for position, item in held.items():
        for rank in owners[position]:
            outgoing[rank][position] = item
    return {p: item for parcel in collectives.exchange(outgoing) for p, item in parcel.items()}


def _by_sample(logprob: Tensor, positions: Sequence[int], samples: Mapping[int, Sample]) -> dict[int, Tensor]:
    """[N] of one micro-batch -> position -> [R]; fillers carry no loss tokens and no position."""
    scores: dict[int, Tensor] = {}
    start = 0
    for position in positions:
        if position not in samples:
            continue
        mask = samples[position].loss_mask
        count = int(mask.sum())
        scores[position] = torch.zeros(len(mask)).masked_scatter_(mask, logprob[start : start + count])
        start += count
    assert start == len(logprob), f"{len(logprob)} log-probabilities for {start} loss tokens"
    return scores
