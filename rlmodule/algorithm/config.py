"""Configuration of an algorithm, except its loss and its advantage estimator, which have config groups of their own.

It is used in ``objective.py``, ``shaping.py``, ``rollout_correction.py`` and ``rollout_rejection.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from rlmodule.algorithm.rollout_correction import RolloutCorrection
from rlmodule.algorithm.rollout_rejection import RolloutRejection
from rlmodule.algorithm.shaping import FilterGroups, KLInReward, OverlongBuffer
from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import MicroBatch, StepTotals
from rlmodule.ops.aggregate import MODES, SEQ_MEAN_TOKEN_SUM_NORM, token_weights
from rlmodule.ops.kl import KINDS as KL_KINDS

OLD_LOGPROB = ("auto", "recompute", "rollout", "available")
ROLLOUTS, DEMONSTRATIONS, PREFERENCES = SOURCES = ("rollouts", "demonstrations", "preferences")


@dataclass(frozen=True)
class AlgorithmConfig:
    """Data source, aggregation, KL, reward shaping and rollout correction of an algorithm."""

    source: str = ROLLOUTS  # rollouts of the policy, demonstrations (SFT), or preferences (pairs of responses)
    train_batch_size: int = 64  # prompts (or demonstrations, or pairs) of one iteration
    ppo_epochs: int = 1  # passes over the samples of an iteration
    loss_agg_mode: str = "token-mean"  # how token losses are aggregated
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm; default rollout.max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    log_entropy: bool = True  # log actor/entropy even if it is not in the objective
    use_kl_loss: bool = False  # add a KL loss to the frozen starting policy
    kl_loss_coef: float = 0.001  # weight of the KL loss
    kl_loss_type: str = "k3"  # estimator of the KL loss
    # recompute: one scoring pass; rollout: those of the rollout engine; available: rollout where stored, else
    # recompute; auto: available for stored rollouts, none where an iteration is one optimizer step, else recompute
    old_logprob: str = "auto"
    skip_zero_advantage: bool = True  # skip samples whose gradient is certainly 0
    use_kl_in_reward: bool = False  # subtract the KL to the frozen starting policy from the reward
    kl_in_reward: KLInReward = field(default_factory=KLInReward)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    mask_truncated: bool = False  # truncated responses count in the group statistics but not in the loss
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    rollout_rejection: RolloutRejection = field(default_factory=RolloutRejection)
    teacher: str | None = None  # folder of the frozen teacher of algorithm=distill

    def __post_init__(self) -> None:
        one_of("source", self.source, SOURCES)
        one_of("loss_agg_mode", self.loss_agg_mode, MODES)
        one_of("kl_loss_type", self.kl_loss_type, KL_KINDS)
        one_of("old_logprob", self.old_logprob, OLD_LOGPROB)
        at_least("train_batch_size", self.train_batch_size, 1)
        at_least("ppo_epochs", self.ppo_epochs, 1)
        at_least("kl_loss_coef", self.kl_loss_coef, 0)
        if self.loss_scale_factor is not None:
            more_than("loss_scale_factor", self.loss_scale_factor, 0)
        elif self.loss_agg_mode == SEQ_MEAN_TOKEN_SUM_NORM:
            raise ConfigError(
                key="loss_scale_factor",
                got=None,
                because=f"{SEQ_MEAN_TOKEN_SUM_NORM} divides by a constant",
                fix="Use ${rollout.max_response_length}, or another loss_agg_mode",
            )
        if self.uses_rollout_logprob and not self.is_sampled:
            raise ConfigError(
                key="old_logprob", got=self.old_logprob, because=f"{self.source} were not sampled", fix="Use recompute"
            )
        if self.use_kl_loss and self.kl_loss_type == "k1":
            raise ConfigError(
                key="kl_loss_type",
                got="k1",
                because="the expected gradient of k1 as a loss is 0, so it has no effect",
                fix="Use kl_loss_type=k2 or k1+ (gradient of the reverse KL), or use_kl_in_reward=true",
            )
        for key, got in self._comparisons.items() if self.uses_rollout_logprob else ():
            raise ConfigError(
                key=key,
                got=got,
                because=f"with old_logprob={self.old_logprob} the trainer computes no log-probabilities to compare "
                "with those of the rollout engine",
                fix=f"Use old_logprob=recompute, or {key}=none",
            )
        if not self.is_sampled:
            self._check_offline_source()

    @property
    def is_sampled(self) -> bool:
        """Whether the responses are sampled from a policy; demonstrations and preferences are given."""
        return self.source == ROLLOUTS

    @property
    def compares_rollouts(self) -> bool:
        """Whether log-probabilities of trainer and rollout engine are compared."""
        return bool(self._comparisons)

    @property
    def _comparisons(self) -> dict[str, str]:
        """Keys of what compares log-probabilities of trainer and rollout engine, with their values."""
        correction, rejection = self.rollout_correction, self.rollout_rejection
        values = {
            "rollout_correction.mode": correction.mode,
            "rollout_rejection.token_estimator": rejection.token_estimator,
            "rollout_rejection.sequence_estimator": rejection.sequence_estimator,
        }
        return {key: value for key, value in values.items() if value != "none"}

    @property
    def learns_from_comparisons(self) -> dict[str, str]:
        """Those of them that weigh or reject tokens, and do not only log."""
        return {key: value for key, value in self._comparisons.items() if value != "observe"}

    @property
    def uses_rollout_logprob(self) -> bool:
        """Whether log-probabilities of the rollout engine are used as those of the old policy."""
        return self.old_logprob in ("rollout", "available")

    def for_stored_rollouts(self) -> AlgorithmConfig:
        """The config for stored rollouts: ``old_logprob=auto`` becomes ``available``.

        With rollout correction or rejection it stays ``auto`` (recompute), because both log-probabilities are compared.
        """
        use_stored = self.old_logprob == "auto" and self.is_sampled and not self.compares_rollouts
        return replace(self, old_logprob="available") if use_stored else self

    def weights(self, batch: MicroBatch, totals: StepTotals) -> Tensor:
        """[N] weight of each loss token of a micro-batch in the loss of the whole step."""
        return token_weights(
            self.loss_agg_mode,
            sequence=batch.sequence,
            loss_tokens=batch.loss_tokens,
            group_tokens=batch.group_tokens,
            totals=totals,
            loss_scale_factor=self.loss_scale_factor,
        )

    def _check_offline_source(self) -> None:
        for name, is_on, because in (
            ("use_kl_loss", self.use_kl_loss, "the KL is estimated on tokens that the policy drew"),
            ("use_kl_in_reward", self.use_kl_in_reward, f"{self.source} have no reward"),
            ("filter_groups.enable", self.filter_groups.enable, f"{self.source} cannot be sampled again"),
            ("overlong_buffer.enable", self.overlong_buffer.enable, f"{self.source} have no reward"),
        ):
            if is_on:
                raise ConfigError(key=name, got=True, because=because, fix="Use false")
        for key, got in self._comparisons.items():
            raise ConfigError(
                key=key,
                got=got,
                because=f"{self.source} were not sampled by any policy",
                fix="Use none",
            )
