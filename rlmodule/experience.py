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
from rlmodule.core.contract import Advantage, Collectives, Layout, Strategy, ValueAdvantage
from rlmodule.core.errors import RLModuleError, TrainingError
from rlmodule.core.types import (
    CRITIC,
    POLICY,
    REFERENCE,
    TEACHER,
    AdvantageInputs,
    ExperienceRow,
    MiniBatch,
    Sample,
    SampleMeta,
    ScoredSample,
)
from rlmodule.objective import Objective
from rlmodule.ops.kl import kl_per_token
from rlmodule.reference_scores import ReferenceScores
from rlmodule.rollout_correction import correction_weights, mismatch_metrics, mismatch_sums
from rlmodule.shaping import KLController, first_groups, informative, overlong_charge
from rlmodule.token_facts import ResponseTokens, gather_energies, gather_tokens, one_token_on, value_metrics

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
        baseline: reward of the greedy response to the same prompt, where there is one.
        version: iterations trained before it was drawn.
    """

    meta: SampleMeta
    reward: float | None
    parts: Mapping[str, float]
    truncated: bool
    baseline: float | None = None
    version: int = 0


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
        advantages: [B] float64 over ``facts``, or None where the loss needs none; means where tokens differ.
        experience: this rank's rows.
        sampler: hands out this rank's mini-batches.
        metrics: facts of the iteration to log, the same on every rank.
    """

    facts: Sequence[SampleFacts]
    advantages: Tensor | None
    experience: Experience
    sampler: BalancedSampler
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoringPass:
    """One pass of one model over the samples of an iteration.

    Args:
        phase: under which its seconds are logged.
        model: who is asked.
        fields: field of ExperienceRow -> output of the model that fills it.
        options: keywords of the model's forward.
    """

    phase: str
    model: str
    fields: Mapping[str, str]
    options: Mapping[str, bool] = field(default_factory=dict)


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
        collectives, layout = self.strategy.collectives, self.strategy.layout
        mine, facts, metrics = self._collect(collect)
        # Values, energies and KL come from passes over the plan; without them advantages are known before it is made.
        needs_scores = self.kl_controller is not None or self.value_model is not None or self._needs_energy
        inputs = None if needs_scores else self._inputs(facts, {}, metrics)
        per_response = self._advantages(inputs)
        with watch.phase("plan"):
            sampler = self.make_sampler(self._metas(facts, per_response))
        position = {f.meta.sample_id: i for i, f in enumerate(facts)}
        with watch.phase("exchange"):
            first = sampler.owners(sampler.first_pass)
            held = _move({position[s.sample_id]: s for s in mine}, first, layout, collectives)
        rows = self._rows(held, sampler, watch)
        rows = self._corrected(rows, metrics)
        if needs_scores:
            inputs = self._inputs(facts, rows, metrics)
            per_response = self._advantages(inputs)
        advantages = None
        if inputs is not None and inputs.tokens is not None:
            rows = self._with_returns(rows, inputs, metrics)
        if per_response is not None:
            advantages = torch.cat(
                [a.mean()[None] if len(a) else a.new_zeros(1) for a in per_response] or [_numbers([])]
            )
            rows = {p: replace(row, advantage=_spread(row.sample, per_response[p])) for p, row in rows.items()}
        if len(sampler.plans) > len(sampler.first_pass):
            with watch.phase("exchange"):
                everyone = sampler.owners(sampler.plans)
                rows = _move(rows, everyone, layout, collectives)
        experience = Experience(rows, self.collator.pad_token_id, len(facts))
        return Iteration(facts, advantages, experience, sampler, metrics)

    def _collect(
        self, collect: Callable[[], list[ScoredSample]]
    ) -> tuple[list[Sample], list[SampleFacts], dict[str, float]]:
        """(this rank's samples, facts of all, metrics); asks for more where flat groups are to be replaced.

        Which groups stay follows from the facts, which every rank has: the first ones that tell anything, in the order
        of the prompts. When the rounds are used up the iteration is smaller; when no group tells anything, the last
        round is kept as it is.
        """
        settings, collectives = self.objective.settings, self.strategy.collectives

        def more() -> tuple[list[Sample], list[SampleFacts]]:
            return gather_facts(lambda: self._checked(collect()), collectives, mask_truncated=settings.mask_truncated)

        mine, facts = last_mine, last_facts = more()
        if not settings.filter_groups.enable:
            return mine, facts, {}
        num_groups = len({f.meta.group_id for f in facts})
        rounds = 1
        kept = self._informative_groups(facts, num_groups)
        while len(kept) < num_groups and rounds < settings.filter_groups.max_num_gen_batches:
            last_mine, last_facts = more()
            mine, facts, rounds = mine + last_mine, facts + last_facts, rounds + 1
            kept = self._informative_groups(facts, num_groups)
        rewards = [f.reward for f in facts if f.reward is not None and math.isfinite(f.reward)]
        metrics = {
            "filter_groups/gen_batches": float(rounds),
            "filter_groups/kept": len(kept) / max(len({f.meta.group_id for f in facts}), 1),
            "filter_groups/reward_mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
        }
        if not kept:
            return last_mine, last_facts, metrics
        return (
            [s for s in mine if s.group_id in kept],
            [f for f in facts if f.meta.group_id in kept],
            metrics,
        )

    @staticmethod
    def _informative_groups(facts: Sequence[SampleFacts], count: int) -> set[int]:
        group = [f.meta.group_id for f in facts]
        tells = informative(_rewards(facts), torch.tensor(group)).tolist() if facts else []
        return first_groups(group, tells, count)

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

    def _checked(self, scored: list[ScoredSample]) -> list[ScoredSample]:
        settings = self.objective.settings
        for reader, remedy, is_on in (
            ("old_logprob=sampler", "old_logprob=recompute", settings.old_logprob == "sampler"),
            ("rollout_correction", "rollout_correction.mode=none", settings.rollout_correction.is_on),
        ):
            for sample in (s.sample for s in scored if is_on and self.objective.needs_old_logprob):
                if sample.sampler_logprob is None:
                    raise TrainingError(
                        f"sample {sample.sample_id} comes without the log-probabilities it was drawn with, "
                        f"which algorithm.{reader} wants. Use algorithm.{remedy}"
                    )
        return scored

    def _inputs(
        self, facts: Sequence[SampleFacts], rows: Mapping[int, ExperienceRow], metrics: dict[str, float]
    ) -> AdvantageInputs | None:
        """What advantages are made of; None where the loss needs none. Adds to ``metrics``."""
        if not self.objective.needs("advantage"):
            return None
        assert self.advantage is not None, "this loss needs an advantage estimator"
        loss_tokens = [f.meta.loss_tokens for f in facts]
        reward, kl_coef = self._shaped_rewards(facts, metrics), 0.0
        if self.kl_controller is not None:
            kl_coef = self.kl_controller.coef
            kl = self._kl_per_response(len(facts), rows, metrics, torch.isfinite(reward))
            if not self.advantage.needs_value:  # which is charged token by token
                reward = reward - kl_coef * kl
        tokens = None
        if self.advantage.needs_value:
            mine = {p: self._tokens(row, kl_coef) for p, row in rows.items()}
            tokens = gather_tokens(mine, loss_tokens, self.strategy.collectives)
        return AdvantageInputs(
            reward=reward,
            group=torch.tensor([f.meta.group_id for f in facts]),
            loss_tokens=torch.tensor(loss_tokens),
            parts={
                name: _numbers([f.parts.get(name) for f in facts])
                for name in sorted({name for f in facts for name in f.parts})
            },
            baseline=_numbers([f.baseline for f in facts]) if self.advantage.needs_baseline else None,
            tokens=tokens,
            energy=self._energies(rows, loss_tokens) if self._needs_energy else None,
        )

    @property
    def _needs_energy(self) -> bool:
        return self.advantage is not None and self.advantage.needs_energy and self.objective.needs("advantage")

    def _energies(self, rows: Mapping[int, ExperienceRow], loss_tokens: Sequence[int]) -> Tensor:
        """[N] float64 over the loss tokens of all responses."""
        mine = {}
        for position, row in rows.items():
            assert row.energy is not None, "the policy was asked for it"
            mine[position] = row.energy[row.sample.loss_mask].double()
        return gather_energies(mine, loss_tokens, self.strategy.collectives)

    def _shaped_rewards(self, facts: Sequence[SampleFacts], metrics: dict[str, float]) -> Tensor:
        """[B] float64: verdicts minus the charge for length."""
        settings = self.objective.settings
        reward = _rewards(facts)
        if settings.overlong_buffer.enable:
            charge = overlong_charge(torch.tensor([f.meta.response_len for f in facts]), settings.overlong_buffer)
            metrics["reward/overlong_charge"] = _mean_over(charge, torch.isfinite(reward))
            reward = reward - charge
        return reward

    def _kl_per_response(
        self, count: int, rows: Mapping[int, ExperienceRow], metrics: dict[str, float], is_scored: Tensor
    ) -> Tensor:
        """[B] float64: sum over the loss tokens of each response; one exchange of one number per response.

        Logs it with its price, which the controller then sets anew for the next iteration.
        """
        assert self.kl_controller is not None, "KL has a price"
        mine = {position: float(self._kl(row).sum()) for position, row in rows.items()}
        kl = torch.zeros(count, dtype=torch.float64)
        for part in self.strategy.collectives.gather_objects(mine):
            for position, value in part.items():
                kl[position] = value
        metrics["reward/kl"] = _mean_over(kl, is_scored)
        metrics["reward/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(_mean_over(kl, is_scored), int(is_scored.sum()))
        return kl

    def _kl(self, row: ExperienceRow) -> Tensor:
        """[n] float64 KL to the reference at each loss token of a row."""
        assert row.old_logprob is not None, "KL in the reward needs both scores"
        assert row.ref_logprob is not None, "KL in the reward needs both scores"
        mask = row.sample.loss_mask
        old, ref = row.old_logprob[mask].double(), row.ref_logprob[mask].double()
        return kl_per_token(old, ref, self.objective.settings.kl_in_reward.estimator)

    def _tokens(self, row: ExperienceRow, kl_coef: float) -> ResponseTokens:
        assert row.old_value is not None, "this advantage needs values"
        value = row.old_value[row.sample.loss_mask].double()
        charge = kl_coef * self._kl(row) if self.kl_controller is not None else torch.zeros_like(value)
        return ResponseTokens(value, charge, row.next_value)

    def _advantages(self, inputs: AdvantageInputs | None) -> list[Tensor] | None:
        """Of each response: [1], or one per loss token; None where there is nothing to make them of."""
        if inputs is None:
            return None
        assert self.advantage is not None, "inputs are made for an estimator"
        count = len(inputs.reward)
        sizes = inputs.loss_tokens.tolist() if self.advantage.per_token else [1] * count
        return list(self.advantage(inputs).split(sizes))

    def _with_returns(
        self, rows: Mapping[int, ExperienceRow], inputs: AdvantageInputs, metrics: dict[str, float]
    ) -> dict[int, ExperienceRow]:
        """Rows with what the value function is to say; adds to ``metrics`` what it said."""
        assert isinstance(self.advantage, ValueAdvantage), "an estimator that needs values says what they should be"
        assert inputs.tokens is not None, "values were gathered"
        returns = self.advantage.returns(inputs)
        metrics |= value_metrics(inputs.tokens, returns)
        by_response = returns.split(inputs.loss_tokens.tolist())
        return {p: replace(row, returns=_spread(row.sample, by_response[p])) for p, row in rows.items()}

    def _corrected(self, rows: dict[int, ExperienceRow], metrics: dict[str, float]) -> dict[int, ExperienceRow]:
        """Rows with a weight for what the sampler and the trainer disagree on; adds to ``metrics`` how much they do."""
        settings = self.objective.settings.rollout_correction
        if not settings.is_on:
            return rows
        seen, corrected = [], dict(rows)
        for position, row in rows.items():
            assert row.old_logprob is not None, "the correction compares with the trainer's scores"
            assert row.sample.sampler_logprob is not None, "checked when it was collected"
            mask = row.sample.loss_mask
            old, sampler = row.old_logprob[mask], row.sample.sampler_logprob[mask]
            weight = correction_weights(old, sampler, settings)
            seen.append((old, sampler, weight))
            if settings.mode != "observe":
                spread = torch.ones(len(mask)).masked_scatter_(mask, weight.float())
                corrected[position] = replace(row, rollout_weight=spread)
        sums = torch.cat([mismatch_sums(seen, settings), torch.tensor([float(sum(len(o) > 0 for o, _, _ in seen))])])
        total = self.strategy.collectives.gather_rows(sums[None].double()).sum((0, 1))
        metrics |= mismatch_metrics(total[:-1], int(total[-1]))
        return corrected

    def _metas(self, facts: Sequence[SampleFacts], advantages: Sequence[Tensor] | None) -> list[SampleMeta]:
        """What is planned: samples that cannot change the gradient are marked to be left out."""
        has_gradient = [f.meta.loss_tokens > 0 for f in facts]
        if advantages is not None and self.objective.ignores_zero_advantage:
            # As float32, in which the loss sees them.
            has_gradient = [a and bool((b.float() != 0).any()) for a, b in zip(has_gradient, advantages, strict=True)]
        return [replace(f.meta, is_left_out=not has) for f, has in zip(facts, has_gradient, strict=True)]

    def _rows(
        self, samples: Mapping[int, Sample], sampler: BalancedSampler, watch: Stopwatch
    ) -> dict[int, ExperienceRow]:
        rows = {p: ExperienceRow(s, teacher_logprob=s.teacher_logprob) for p, s in samples.items()}
        as_sampled = self._as_sampled(samples)
        for asked in self._passes(must_score=self._must_score(samples, as_sampled)):
            with watch.phase(asked.phase):
                scores = self._kept_or_scored(asked, samples, sampler)
            rows = {
                p: replace(row, **{field: scores[said][p] for field, said in asked.fields.items()})  # type: ignore[arg-type]
                for p, row in rows.items()
            }
        rows |= {p: replace(rows[p], old_logprob=logprob) for p, logprob in as_sampled.items()}
        if isinstance(self.advantage, ValueAdvantage) and self.advantage.bootstrap_truncated:
            with watch.phase("value"):
                rows = self._with_next_values(rows, sampler)
        return rows

    def _kept_or_scored(
        self, asked: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """As ``score``; what the reference said of samples that come round again is not asked twice."""
        kept, collectives = self.reference_scores, self.strategy.collectives
        if kept is None or "ref_logprob" not in asked.fields:
            return self.score(asked, samples, sampler)
        known = kept.of(samples, collectives)
        if known is None:
            known = self.score(asked, samples, sampler)["logprob"]
            kept.keep(samples, known, collectives)
        return {"logprob": known}

    def _as_sampled(self, samples: Mapping[int, Sample]) -> dict[int, Tensor]:
        """Old log-probabilities that need no pass: those that samples were drawn with, where settings take them."""
        if not (self.objective.needs_old_logprob and self.objective.settings.reads_sampler):
            return {}
        return {p: s.sampler_logprob for p, s in samples.items() if s.sampler_logprob is not None}

    def _must_score(self, samples: Mapping[int, Sample], as_sampled: Mapping[int, Tensor]) -> bool:
        """Whether the policy has to say old log-probabilities; a pass is made by all ranks or by none."""
        wanted = self.objective.settings.old_logprob
        if not self.objective.needs_old_logprob or wanted == "sampler":
            return False
        if wanted == "available":
            return not all(self.strategy.collectives.gather_objects(len(as_sampled) == len(samples)))
        return True

    def _passes(self, *, must_score: bool) -> list[ScoringPass]:
        """What is asked of which model; what one model says it says in one pass."""
        passes, of_policy = [], {}
        if must_score:
            of_policy["old_logprob"] = "logprob"
        if self.value_model == POLICY:
            of_policy["old_value"] = "value"
        if self._needs_energy:
            of_policy["energy"] = "energy"
        if of_policy:
            options = {"with_energy": True} if self._needs_energy else {}
            passes.append(ScoringPass("old_logprob", POLICY, of_policy, options))
        if self.value_model == CRITIC:
            passes.append(ScoringPass("value", CRITIC, {"old_value": "value"}))
        if self.objective.needs_reference:
            model, options = (POLICY, {"with_adapter": False}) if self.reference_in_policy else (REFERENCE, {})
            passes.append(ScoringPass("ref_logprob", model, {"ref_logprob": "logprob"}, options))
        if self.objective.settings.teacher is not None:
            passes.append(ScoringPass("teacher_logprob", TEACHER, {"teacher_logprob": "logprob"}))
        return passes

    def _with_next_values(self, rows: dict[int, ExperienceRow], sampler: BalancedSampler) -> dict[int, ExperienceRow]:
        """Rows of responses that were cut, with what is expected of what would have come; a pass over those alone."""
        assert self.value_model is not None, "somebody says values"
        cut = {p: one_token_on(row.sample) for p, row in rows.items() if row.sample.finish == "length"}
        said = self.score(ScoringPass("value", self.value_model, {"next_value": "value"}), cut, sampler)["value"]
        return rows | {p: replace(rows[p], next_value=float(value[-1])) for p, value in said.items()}

    def packed(self, experience: Experience, share: RankShare) -> MiniBatch:
        """One mini-batch on the host, where copies to a CUDA device do not wait for it."""
        mini_batch = self.collator(experience.__getitems__(share))
        if self.device.type != "cuda":
            return mini_batch
        with torch.cuda.device(self.device):  # page-locked memory belongs to a device, threads start with the first
            return mini_batch.pin_memory()

    def score(
        self, asked: ScoringPass, samples: Mapping[int, Sample], sampler: BalancedSampler
    ) -> dict[str, dict[int, Tensor]]:
        """Output of the model -> position -> [R] of every sample given, over the micro-batches of the first update.

        The same micro-batches give the same rounding, so the first ratio of an update is exactly 1. Tokens without loss
        keep 0. Where rows are cut over ranks, each gets the scores of whole samples. Every rank takes part, also one
        that gives no samples: in a micro-batch without any it runs a dummy.
        """
        unscored = Experience(
            {p: ExperienceRow(s) for p, s in samples.items()}, self.collator.pad_token_id, len(sampler.metas)
        )
        sequence, forward = self.strategy.sequence, self.strategy.wrapped(asked.model)
        parts: dict[str, list[Tensor]] = {said: [] for said in asked.fields.values()}
        places: list[Sequence[int]] = []
        with self.strategy.eval_mode(asked.model):
            for share in sampler.shares(sampler.first_pass):
                given = tuple(
                    tuple(p for p in step if p in samples or p >= len(sampler.metas)) for step in share.micro_batches
                )
                mini_batch = self.collator(unscored.__getitems__(replace(share, micro_batches=given)))
                for micro_batch, positions in zip(mini_batch.micro_batches, given, strict=True):
                    outputs = forward(micro_batch.to(self.device), **asked.options)
                    for said, so_far in parts.items():
                        so_far.append(getattr(outputs, said))
                    places.append(positions)
        # After the last pass: reading a result off a device waits for it.
        on_host = {said: [row.cpu() for row in rows] for said, rows in parts.items()}
        return {
            said: {
                p: r
                for row, at in zip(rows if sequence is None else sequence.gather_slices(rows), places, strict=True)
                for p, r in _by_sample(row, at, samples).items()
            }
            for said, rows in on_host.items()
        }


def _rewards(facts: Sequence[SampleFacts]) -> Tensor:
    return _numbers([f.reward for f in facts])


def _numbers(values: Sequence[float | None]) -> Tensor:
    """[B] float64, NaN for None."""
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)


def _mean_over(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else math.nan


def _spread(sample: Sample, values: Tensor) -> Tensor:
    """[1], or one per loss token -> [R] float32; tokens without loss get 0 where loss tokens have their own."""
    mask = sample.loss_mask
    if len(values) == 1:
        return torch.full((len(mask),), float(values))
    return torch.zeros(len(mask)).masked_scatter_(mask, values.float())


def gather_facts(
    collect: Callable[[], list[ScoredSample]], collectives: Collectives, *, mask_truncated: bool = False
) -> tuple[list[Sample], list[SampleFacts]]:
    """(this rank's samples, facts of every rank's by sample id). Unscored samples lose their loss tokens.

    With ``mask_truncated`` so do responses that were cut at the limit; they keep their reward.

    Raises:
        TrainingError: on every rank, when collecting failed on any.
    """
    try:
        scored, failure = [_masked(s, mask_truncated) for s in collect()], None
    except RLModuleError as error:
        scored, failure = [], error
    facts = [
        SampleFacts(
            s.sample.meta,
            s.score.value,
            dict(s.score.parts),
            s.sample.finish == "length",
            s.baseline,
            s.sample.version,
        )
        for s in scored
    ]
    everyone = collectives.gather_objects((facts, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            raise TrainingError(f"rank {rank} could not collect its responses: {reason}")
    return [s.sample for s in scored], sorted((f for part, _ in everyone for f in part), key=lambda f: f.meta.sample_id)


def _masked(scored: ScoredSample, mask_truncated: bool) -> ScoredSample:
    is_scored = scored.score.value is not None and math.isfinite(scored.score.value)
    if is_scored and not (mask_truncated and scored.sample.finish == "length"):
        return scored
    return replace(scored, sample=replace(scored.sample, loss_mask=torch.zeros_like(scored.sample.loss_mask)))


def _move(
    held: Mapping[int, T], owners: Mapping[int, Iterable[int]], layout: Layout, collectives: Collectives
) -> dict[int, T]:
    """Send each held item to all ranks of the data ranks that own its position, if any; returns what is owned here."""
    outgoing: list[dict[int, T]] = [{} for _ in range(layout.token_ranks)]
    for position, item in held.items():
        for data_rank in owners.get(position, ()):
            for sp_rank in range(layout.sp_size):
                outgoing[data_rank * layout.sp_size + sp_rank][position] = item
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
