"""What is minimised: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference), put together once.

Losses say something about each token; the one reduction is here, with the totals of the whole mini-batch.
Leaves out the losses themselves (``losses/``) and who runs forward and backward (``training/update.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.core.contract import Loss, SelectingLoss, SequenceRanks
from rlmodule.core.metrics import Metric, merge, ratio, total
from rlmodule.core.types import LossInputs, MicroBatch, StepTotals, identity
from rlmodule.ops.aggregate import aggregate, share_of
from rlmodule.ops.kl import kl_per_token


@dataclass(frozen=True)
class Objective:
    """The loss of the menu with its additions; the same for every micro-batch.

    Args:
        loss: of each token.
        config: what is added to it, and how tokens become one number.
        label: the first part of the names of its metrics.
    """

    loss: Loss
    config: AlgorithmConfig
    label: str = "actor"

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must give entropies."""
        return self.config.entropy_coeff != 0 or self.config.log_entropy

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy must score the samples."""
        return self.config.use_kl_loss or self.config.use_kl_in_reward or self.needs("ref_logprob")

    @property
    def needs_old_logprob(self) -> bool:
        """Whether the policy that starts the update must score the samples."""
        return self.needs("old_logprob") or self.config.use_kl_in_reward or self.config.rollout_correction.is_on

    @property
    def ignores_zero_advantage(self) -> bool:
        """Whether samples with an advantage of 0 on every token are left out of the update.

        Metrics per token (clip fractions, ``ppo_kl``, ``entropy``) are then means over the tokens that were trained on;
        ``pg_loss`` and ``loss`` are what they would be, because such a sample adds 0 to them.
        """
        return self.config.skip_zero_advantage and self.no_gradient_at_zero_advantage

    @property
    def no_gradient_at_zero_advantage(self) -> bool:
        """Whether samples with an advantage of 0 on every token have a gradient of exactly 0.

        The loss must promise it, and nothing else in the objective may give them one. With KL in the reward advantages
        are known only after every sample was scored, so nothing is said of them.
        """
        s = self.config
        is_alone = s.entropy_coeff == 0 and not s.use_kl_loss and not s.use_kl_in_reward
        return is_alone and self.loss.zero_at_zero_advantage

    def needs(self, name: str) -> bool:
        """Whether the policy loss reads the field ``name`` of LossInputs."""
        return name in self.loss.needs

    @property
    def selects(self) -> SelectingLoss | None:
        """The policy loss, where it picks tokens out of the whole mini-batch."""
        if not self.needs("selected"):
            return None
        assert isinstance(self.loss, SelectingLoss), f"{type(self.loss).__name__} needs selected but selects nothing"
        return self.loss

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> MicroBatchObjective:
        """The objective of one micro-batch, ready to be given log-probabilities.

        Where ``sequence`` ranks cut a row, each has the tokens of its own slice: shares and metrics add up over them.
        """
        return MicroBatchObjective(self, batch, totals, self.config.weights(batch, totals), sequence)


class MicroBatchObjective:
    """What the model's forward pass is given to turn log-probabilities into a loss, a chunk of tokens at a time.

    Args:
        objective: what is minimised.
        batch: the micro-batch.
        totals: counts of its mini-batch.
        weight: [N] what each token counts for.
        sequence: ranks that share the row, None where it is not cut.
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
        # Only a loss that gets all tokens at once can add up sequences: chunks differ in number from slice to slice.
        self._over_slices = None
        if self.whole_sequences:
            self._over_slices = identity if sequence is None else sequence.sum_over_slices
        self._parts: list[dict[str, Metric]] = []

    @property
    def metrics(self) -> dict[str, Metric]:
        """What the tokens seen so far say."""
        return merge(self._parts)

    def of_values(self, value: Tensor) -> Tensor:
        """[N] scores of a model that gives them in the place of log-probabilities -> scalar to call backward on."""
        return self(value, None, slice(0, len(value)))

    def __call__(self, logprob: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        """[C] log-probabilities (with gradient) and entropies of the tokens ``part`` -> scalar to call backward on."""
        config, batch, weight = self.objective.config, self.batch, self.weight[part]
        inputs = LossInputs.of(batch, logprob, part, self._over_slices)
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
    """[C] per token -> its part of the number that is optimised, added up in float64."""
    return total(share_of(value.detach().double(), weight))


def per_token(value: Tensor) -> Metric:
    """[N] -> its mean over the loss tokens of the whole mini-batch."""
    return ratio(value.detach().double().sum(), float(len(value)))
