"""The objective: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference).

Losses are per token; they are reduced here and nowhere else, with the totals of the whole mini-batch. The losses are in
``losses/``; ``training/update.py`` runs forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.core.contract import Loss, SelectingLoss, SequenceRanks, TopTokensLoss
from rlmodule.core.metrics import Metric, merge, ratio, total
from rlmodule.core.types import LossInputs, MicroBatch, StepTotals, identity
from rlmodule.ops.aggregate import aggregate, share_of
from rlmodule.ops.kl import kl_per_token


@dataclass(frozen=True)
class Objective:
    """Policy loss with entropy bonus and KL loss; one object for all micro-batches.

    Args:
        loss: policy loss per token.
        config: coefficients and aggregation mode.
        label: prefix of the metric names.
    """

    loss: Loss
    config: AlgorithmConfig
    label: str = "actor"

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must compute entropies."""
        return self.config.entropy_coeff != 0 or self.config.log_entropy

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen reference policy must score the samples."""
        return self.config.use_kl_loss or self.config.use_kl_in_reward or self.needs("ref_logprob")

    @property
    def needs_old_logprob(self) -> bool:
        """Whether the policy that starts the update must score the samples, in an iteration of several steps."""
        return self.needs("old_logprob") or self.old_logprob_is_read_before

    @property
    def old_logprob_is_read_before(self) -> bool:
        """Whether the scores of the policy that starts the update are wanted before the update."""
        return self.config.use_kl_in_reward or self.config.compares_rollouts

    def scores_old_logprob(self, steps: int) -> bool:
        """Whether a pass of its own gives old log-probabilities in an iteration of so many optimizer steps.

        The only step of an iteration computes them anyway: its ratios are exactly 1. Where some samples come with the
        log-probabilities they were drawn with (``available``), a pass is needed for the others alone.
        """
        wanted = self.config.old_logprob
        if not self.needs_old_logprob or wanted == "rollout":
            return False
        return wanted != "auto" or steps > 1 or self.old_logprob_is_read_before

    @property
    def ignores_zero_advantage(self) -> bool:
        """Whether samples with advantage 0 on every token are skipped in the update.

        This needs a loss without gradient at advantage 0 (``zero_at_zero_advantage``) and no other term in the
        objective. With KL in the reward, advantages are known only after every sample was scored, so none is skipped.
        Metrics per token (clip fractions, ``ppo_kl``, ``entropy``) are then means over the computed tokens; ``pg_loss``
        and ``loss`` do not change, because a skipped sample contributes 0.
        """
        return self.config.skip_zero_advantage and self.no_gradient_at_zero_advantage

    @property
    def no_gradient_at_zero_advantage(self) -> bool:
        """Whether samples with an advantage of 0 on every token have a gradient of exactly 0."""
        config = self.config
        is_loss_alone = config.entropy_coeff == 0 and not config.use_kl_loss and not config.use_kl_in_reward
        return is_loss_alone and self.loss.zero_at_zero_advantage

    def alone(self, label: str, loss_agg_mode: str) -> Objective:
        """The loss with nothing added to it, averaged by ``loss_agg_mode``; its metrics are logged under ``label``."""
        config = replace(self.config, loss_agg_mode=loss_agg_mode, entropy_coeff=0.0, log_entropy=False)
        return replace(self, config=config, label=label)

    def needs(self, name: str) -> bool:
        """Whether the policy loss reads the field ``name`` of LossInputs."""
        return name in self.loss.needs

    @property
    def num_top_tokens(self) -> int:
        """How many of the teacher's likeliest tokens the policy loss reads at each position; 0 for none."""
        if not self.needs("teacher_top_logprob"):
            return 0
        assert isinstance(self.loss, TopTokensLoss), f"{type(self.loss).__name__} does not say how many tokens it needs"
        return self.loss.top_k

    @property
    def selects(self) -> SelectingLoss | None:
        """The policy loss if it selects tokens over the whole mini-batch, else None."""
        if not self.needs("selected"):
            return None
        assert isinstance(self.loss, SelectingLoss), f"{type(self.loss).__name__} needs selected but selects nothing"
        return self.loss

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> MicroBatchObjective:
        """The objective of one micro-batch, a function of its log-probabilities.

        With ``sequence`` ranks, each rank has the tokens of its shard of the row; losses and metrics add up over them.
        """
        return MicroBatchObjective(self, batch, totals, self.config.weights(batch, totals), sequence)


class MicroBatchObjective:
    """The objective of one micro-batch as a callback of the forward pass, called with one chunk of tokens at a time.

    Args:
        objective: the objective.
        batch: the micro-batch.
        totals: counts of its mini-batch.
        weight: [N] weight of each loss token.
        sequence: sequence-parallel ranks that share the row, None if it is not sharded.
    """

    def __init__(
        self,
        objective: Objective,
        batch: MicroBatch,
        totals: StepTotals,
        weight: Tensor,
        sequence: SequenceRanks | None = None,
    ) -> None:
        self.objective, self.batch, self.totals, self.weight = objective, batch, totals, weight
        self.needs_entropy = objective.needs_entropy
        self.whole_sequences = objective.loss.whole_sequences
        # Sums over sequences are collectives, and ranks may have different numbers of chunks: the loss is called once.
        self._over_slices = None
        if self.whole_sequences:
            self._over_slices = identity if sequence is None else sequence.sum_over_slices
        self._parts: list[dict[str, Metric]] = []

    @property
    def metrics(self) -> dict[str, Metric]:
        """Metrics of the chunks so far, merged."""
        return merge(self._parts)

    def of_values(self, value: Tensor) -> Tensor:
        """[N] scores of a reward model, in place of log-probabilities -> scalar for ``backward``."""
        return self(value, None, slice(0, len(value)))

    def __call__(
        self, logprob: Tensor, entropy: Tensor | None, part: slice, top_logprob: Tensor | None = None
    ) -> Tensor:
        """[C] log-probabilities (with gradient) and entropies of the tokens ``part`` -> scalar for ``backward``."""
        config, batch, weight = self.objective.config, self.batch, self.weight[part]
        inputs = LossInputs.of(batch, logprob, part, self._over_slices, top_logprob)
        policy = self.objective.loss(inputs)
        loss = policy.loss if batch.rollout_weight is None else policy.loss * batch.rollout_weight[part]  # [C]
        metrics = {"pg_loss": share(loss, weight)}
        metrics |= {name: per_token(value) for name, value in policy.metrics.items()}
        metrics |= {name: share(value, weight) for name, value in policy.shares.items()}
        if entropy is not None:
            metrics["entropy"] = per_token(entropy)
            if config.entropy_coeff != 0:
                loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            assert inputs.ref_logprob is not None, "use_kl_loss needs reference log-probabilities"
            kl = kl_per_token(logprob, inputs.ref_logprob, config.kl_loss_type)
            loss = loss + config.kl_loss_coef * kl
            metrics["kl_loss"] = share(kl, weight)
        metrics["loss"] = share(loss, weight)
        self._parts.append({f"{self.objective.label}/{name}": metric for name, metric in metrics.items()})
        return aggregate(loss, weight, self.totals)


def share(value: Tensor, weight: Tensor) -> Metric:
    """[C] value per token -> its contribution to the aggregated value of the step, summed in float64."""
    return total(share_of(value.detach().double(), weight))


def per_token(value: Tensor) -> Metric:
    """[N] value per token -> its mean over the loss tokens of the whole mini-batch."""
    return ratio(value.detach().double().sum(), float(len(value)))
