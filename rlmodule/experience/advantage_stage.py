"""What each response is worth: rewards shaped, KL charged, advantages and returns made of all samples of an iteration.

Leaves out the estimators (``advantages/``), the maths of shaping (``algorithm/shaping.py``) and who says values
(``scoring.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlmodule.algorithm.objective import Objective
from rlmodule.algorithm.shaping import KLController, overlong_penalty
from rlmodule.core.contract import Advantage, Collectives, ValueAdvantage
from rlmodule.core.types import AdvantageInputs, Sample, TrainingSample
from rlmodule.experience.redistribute import all_gather_dict
from rlmodule.experience.sample_table import SampleTable
from rlmodule.experience.token_values import ResponseTokens, gather_loss_tokens, gather_tokens, value_metrics
from rlmodule.ops.kl import kl_per_token


@dataclass(frozen=True)
class AdvantageStage:
    """Makes advantages of facts and scores, the same on every rank.

    Args:
        objective: says whether the loss reads advantages, and how rewards are shaped.
        advantage: estimator, or None where the loss needs none.
        collectives: of the ranks that hold rows.
        kl_controller: the price of KL in the reward, or None where it is not in the reward.
    """

    objective: Objective
    advantage: Advantage | None
    collectives: Collectives
    kl_controller: KLController | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether models have to be asked before there are advantages."""
        return self.kl_controller is not None or self.needs_energy

    @property
    def needs_energy(self) -> bool:
        """Whether the estimator reads the energy of each token."""
        return self.advantage is not None and "energy" in self.advantage.needs and self.objective.needs("advantage")

    @property
    def needs_next_value(self) -> bool:
        """Whether the estimator reads what is expected after a response that was cut."""
        return isinstance(self.advantage, ValueAdvantage) and self.advantage.bootstrap_truncated

    def inputs(
        self, sample_info: SampleTable, rows: Mapping[int, TrainingSample], metrics: dict[str, float]
    ) -> AdvantageInputs | None:
        """What advantages are made of; None where the loss needs none. Adds to ``metrics``."""
        if not self.objective.needs("advantage"):
            return None
        assert self.advantage is not None, "this loss needs an advantage estimator"
        loss_tokens = torch.from_numpy(sample_info.metas.loss_tokens).long()
        reward, kl_coef = self._shaped_rewards(sample_info, metrics), 0.0
        if self.kl_controller is not None:
            kl_coef = self.kl_controller.coef
            kl = self._kl_per_response(len(sample_info), rows, metrics, torch.isfinite(reward) & (loss_tokens > 0))
            if "tokens" not in self.advantage.needs:  # which is charged token by token
                reward = reward - kl_coef * kl
        tokens = None
        if "tokens" in self.advantage.needs:
            mine = {p: self._tokens(row, kl_coef) for p, row in rows.items()}
            tokens = gather_tokens(mine, loss_tokens.tolist(), self.collectives)
        return AdvantageInputs(
            reward=reward,
            group=torch.from_numpy(sample_info.metas.group_id),
            loss_tokens=loss_tokens,
            parts={
                name: torch.from_numpy(np.where(column.present, column.values, np.nan))
                for name, column in sorted(sample_info.parts.items())
                if column.present.any()
            },
            baseline=torch.from_numpy(sample_info.baseline) if "baseline" in self.advantage.needs else None,
            tokens=tokens,
            energy=self._of_loss_tokens("energy", rows, loss_tokens) if self.needs_energy else None,
            rollout_weight=self._of_loss_tokens("rollout_weight", rows, loss_tokens)
            if "rollout_weight" in self.advantage.needs
            else None,
        )

    def _of_loss_tokens(self, name: str, rows: Mapping[int, TrainingSample], loss_tokens: Tensor) -> Tensor:
        """[N] float64 of the field ``name`` over the loss tokens of all responses."""
        mine = {}
        for position, row in rows.items():
            values: Tensor | None = getattr(row, name)
            assert values is not None, f"the estimator reads {name}, and a row lacks it"
            mine[position] = values[row.sample.loss_mask].double()
        return gather_loss_tokens(mine, loss_tokens.tolist(), self.collectives)

    def _shaped_rewards(self, sample_info: SampleTable, metrics: dict[str, float]) -> Tensor:
        """[B] float64: verdicts minus the charge for length."""
        config = self.objective.config
        reward = torch.from_numpy(sample_info.reward)
        if config.overlong_buffer.enable:
            drawn = sample_info.metas.response_len - sample_info.num_shown
            penalty = overlong_penalty(torch.from_numpy(drawn), config.overlong_buffer)
            metrics["reward/overlong_penalty"] = _mean_over(penalty, torch.isfinite(reward))
            reward = reward - penalty
        return reward

    def _kl_per_response(
        self, count: int, rows: Mapping[int, TrainingSample], metrics: dict[str, float], counts: Tensor
    ) -> Tensor:
        """[B] float64: sum over the loss tokens of each response; one exchange of one number per response.

        Logs its mean over the responses that count, [B] bool, with its price, which the controller then sets anew for
        the next iteration.
        """
        assert self.kl_controller is not None, "KL has a price"
        mine = {position: float(self._kl(row).sum()) for position, row in rows.items()}
        kl = torch.zeros(count, dtype=torch.float64)
        for position, value in all_gather_dict(mine, self.collectives).items():
            kl[position] = value
        metrics["reward/kl"] = _mean_over(kl, counts)
        metrics["reward/kl_coef"] = self.kl_controller.coef
        self.kl_controller.update(metrics["reward/kl"], int(counts.sum()))
        return kl

    def _kl(self, row: TrainingSample) -> Tensor:
        """[n] float64 KL to the reference at each loss token of a row."""
        assert row.old_logprob is not None, "KL in the reward needs both scores"
        assert row.ref_logprob is not None, "KL in the reward needs both scores"
        mask = row.sample.loss_mask
        old, ref = row.old_logprob[mask].double(), row.ref_logprob[mask].double()
        return kl_per_token(old, ref, self.objective.config.kl_in_reward.estimator)

    def _tokens(self, row: TrainingSample, kl_coef: float) -> ResponseTokens:
        assert row.old_value is not None, "this advantage needs values"
        value = row.old_value[row.sample.loss_mask].double()
        penalty = kl_coef * self._kl(row) if self.kl_controller is not None else torch.zeros_like(value)
        return ResponseTokens(value, penalty, row.next_value)

    def advantages(self, inputs: AdvantageInputs | None) -> PerResponse | None:
        """Of each response: one, or one per loss token; None where there is nothing to make them of."""
        if inputs is None:
            return None
        assert self.advantage is not None, "inputs are made for an estimator"
        return PerResponse(self.advantage(inputs), inputs.loss_tokens if self.advantage.per_token else None)

    def with_returns(
        self, rows: dict[int, TrainingSample], inputs: AdvantageInputs | None, metrics: dict[str, float]
    ) -> dict[int, TrainingSample]:
        """Rows with what the value function is to say, where there is one; adds to ``metrics`` what it said."""
        if inputs is None or inputs.tokens is None:
            return rows
        assert isinstance(self.advantage, ValueAdvantage), "an estimator that needs values says what they should be"
        returns = self.advantage.returns(inputs)
        metrics |= value_metrics(inputs.tokens, returns)
        by_response = returns.split(inputs.loss_tokens.tolist())
        return {p: replace(row, returns=broadcast_to_tokens(row.sample, by_response[p])) for p, row in rows.items()}


@dataclass(frozen=True, eq=False)
class PerResponse:
    """Numbers of each of B responses, end to end.

    Args:
        values: [N] float.
        sizes: [B] int64, how many each response has; None where each has one.
    """

    values: Tensor
    sizes: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.values) if self.sizes is None else int(self.sizes.sum())
        assert len(self.values) == count, f"{len(self.values)} numbers for {count}"

    @cached_property
    def ends(self) -> Tensor:
        """[B] int64, where the numbers of each response end."""
        assert self.sizes is not None, "the number of a response ends where it begins"
        return self.sizes.cumsum(0)

    def __getitem__(self, position: int) -> Tensor:
        """Those of one response."""
        if self.sizes is None:
            return self.values[position : position + 1]
        end = int(self.ends[position])
        return self.values[end - int(self.sizes[position]) : end]

    @property
    def is_zero(self) -> Tensor:
        """[B] bool, whether all of a response's are 0 as float32, in which the loss sees them."""
        is_zero = self.values.float() == 0
        if self.sizes is None:
            return is_zero
        response = torch.arange(len(self.sizes)).repeat_interleave(self.sizes)
        return torch.bincount(response[~is_zero], minlength=len(self.sizes)) == 0

    @property
    def means(self) -> Tensor:
        """[B] float64, the mean over the numbers of each response; NaN for one without any."""
        if self.sizes is None:
            return self.values
        return torch.stack([part.mean() for part in self.values.split(self.sizes.tolist())])


def with_advantages(rows: dict[int, TrainingSample], per_response: PerResponse | None) -> dict[int, TrainingSample]:
    """Rows with what their response is worth, where the loss reads it."""
    if per_response is None:
        return rows
    return {p: replace(row, advantage=broadcast_to_tokens(row.sample, per_response[p])) for p, row in rows.items()}


def _mean_over(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else math.nan


def broadcast_to_tokens(sample: Sample, values: Tensor) -> Tensor:
    """[1], or one per loss token -> [R] float32; tokens without loss get 0 where loss tokens have their own."""
    mask = sample.loss_mask
    if len(values) == 1:
        return torch.full((len(mask),), float(values))
    return torch.zeros(len(mask)).masked_scatter_(mask, values.float())
