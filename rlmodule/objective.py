"""What is minimised: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference), put together once.

Losses say something about each token; the one reduction is here, with the totals of the whole mini-batch.
Leaves out the losses themselves (``losses/``) and who runs forward and backward (``update.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.contract import Loss, SequenceRanks
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import Metric, ratio, total
from rlmodule.core.types import LossInputs, MicroBatch, StepTotals, TokenOutputs, itself
from rlmodule.ops.aggregate import MODES, aggregate, share_of, token_weights
from rlmodule.ops.kl import KINDS as KL_KINDS
from rlmodule.ops.kl import kl_per_token

SCALED_MODE = "seq-mean-token-sum-norm"


@dataclass(frozen=True)
class AlgorithmConfig:
    """How responses become an objective; the loss and the advantage have menus of their own."""

    source: str = "rollouts"  # rollouts of the policy, or demonstrations to imitate
    train_batch_size: int = 64  # prompts (or demonstrations) of one iteration
    ppo_epochs: int = 1  # passes over the samples of an iteration
    loss_agg_mode: str = "token-mean"  # how token losses become one number
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm; default rollout.max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    log_entropy: bool = True  # log actor/entropy also when it is not in the objective
    use_kl_loss: bool = False  # add KL to the frozen starting policy
    kl_loss_coef: float = 0.001  # weight of that KL
    kl_loss_type: str = "k3"  # estimator of that KL

    def __post_init__(self) -> None:
        one_of("source", self.source, ("rollouts", "demonstrations"))
        one_of("loss_agg_mode", self.loss_agg_mode, MODES)
        one_of("kl_loss_type", self.kl_loss_type, KL_KINDS)
        at_least("train_batch_size", self.train_batch_size, 1)
        at_least("ppo_epochs", self.ppo_epochs, 1)
        if self.loss_scale_factor is not None:
            more_than("loss_scale_factor", self.loss_scale_factor, 0)
        if self.use_kl_loss and self.source == "demonstrations":
            raise ConfigError(
                key="use_kl_loss", got=True, because="demonstrations are imitated without a reference", fix="Use false"
            )


@dataclass(frozen=True)
class Objective:
    """One micro-batch's share of the step's loss, and the metrics that say what it was."""

    loss: Loss
    settings: AlgorithmConfig

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must give entropies."""
        return self.settings.entropy_coeff != 0 or self.settings.log_entropy

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy must score the samples."""
        return self.settings.use_kl_loss

    def needs(self, name: str) -> bool:
        """Whether the policy loss reads the field ``name`` of LossInputs."""
        return name in self.loss.needs

    def __call__(
        self, outputs: TokenOutputs, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> tuple[Tensor, dict[str, Metric]]:
        """(scalar to call backward on, metrics); the scalar of a dummy is 0 and keeps its graph.

        Where ``sequence`` ranks cut a row, each has the tokens of its own slice: shares and metrics add up over them.
        """
        settings = self.settings
        weight = token_weights(
            settings.loss_agg_mode,
            sequence=batch.sequence,
            loss_tokens=batch.loss_tokens,
            group_tokens=batch.group_tokens,
            totals=totals,
            loss_scale_factor=settings.loss_scale_factor,
        )  # [N]
        inputs = LossInputs(
            logprob=outputs.logprob,
            sequence=batch.sequence,
            loss_tokens=batch.loss_tokens,
            old_logprob=batch.old_logprob,
            advantage=batch.advantage,
            ref_logprob=batch.ref_logprob,
            over_slices=itself if sequence is None else sequence.sum_over_slices,
        )
        policy = self.loss(inputs)
        objective = policy.loss  # [N]
        metrics = {"actor/pg_loss": total(share_of(policy.loss.detach().double(), weight))}
        metrics |= {f"actor/{name}": per_token(value) for name, value in policy.metrics.items()}
        if outputs.entropy is not None:
            metrics["actor/entropy"] = per_token(outputs.entropy)
            if settings.entropy_coeff != 0:
                objective = objective - settings.entropy_coeff * outputs.entropy
        if settings.use_kl_loss:
            assert batch.ref_logprob is not None, "use_kl_loss needs reference log-probabilities"
            kl = kl_per_token(outputs.logprob, batch.ref_logprob, settings.kl_loss_type)
            objective = objective + settings.kl_loss_coef * kl
            metrics["actor/kl_loss"] = total(share_of(kl.detach().double(), weight))
        metrics["actor/loss"] = total(share_of(objective.detach().double(), weight))
        return aggregate(objective, weight, totals), metrics


def per_token(value: Tensor) -> Metric:
    """[N] -> its mean over the loss tokens of the whole mini-batch."""
    return ratio(value.detach().double().sum(), float(len(value)))
