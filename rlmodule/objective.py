"""What is minimised: policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference), put together once.

Losses say something about each token; the one reduction is here, with the totals of the whole mini-batch.
Leaves out the losses themselves (``losses/``) and who runs forward and backward (``update.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.contract import Loss, SelectingLoss, SequenceRanks
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import Metric, merge, ratio, total
from rlmodule.core.types import LossInputs, MicroBatch, StepTotals, itself
from rlmodule.ops.aggregate import MODES, SEQ_MEAN_TOKEN_SUM_NORM, aggregate, share_of, token_weights
from rlmodule.ops.kl import KINDS as KL_KINDS
from rlmodule.ops.kl import kl_per_token
from rlmodule.rollout_correction import RolloutCorrection
from rlmodule.shaping import FilterGroups, KLInReward, OverlongBuffer

OLD_LOGPROB = ("auto", "recompute", "sampler", "available")
ROLLOUTS, DEMONSTRATIONS, PREFERENCES = SOURCES = ("rollouts", "demonstrations", "preferences")


@dataclass(frozen=True)
class AlgorithmConfig:
    """How responses become an objective; the loss and the advantage have menus of their own."""

    source: str = ROLLOUTS  # rollouts of the policy, demonstrations to imitate, or preferences: pairs to tell apart
    train_batch_size: int = 64  # prompts (or demonstrations, or pairs) of one iteration
    ppo_epochs: int = 1  # passes over the samples of an iteration
    loss_agg_mode: str = "token-mean"  # how token losses become one number
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm; default rollout.max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    log_entropy: bool = True  # log actor/entropy also when it is not in the objective
    use_kl_loss: bool = False  # add KL to the frozen starting policy
    kl_loss_coef: float = 0.001  # weight of that KL
    kl_loss_type: str = "k3"  # estimator of that KL
    old_logprob: str = (
        "auto"  # recompute by a pass of the trainer; sampler: its own; available: its own where known; auto
    )
    skip_zero_advantage: bool = True  # do not compute samples whose gradient is 0 for sure
    use_kl_in_reward: bool = False  # take the KL to the frozen starting policy off the reward
    kl_in_reward: KLInReward = field(default_factory=KLInReward)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    overlong_buffer: OverlongBuffer = field(default_factory=OverlongBuffer)
    mask_truncated: bool = False  # responses cut at the limit count in the group statistics but not in the loss
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    teacher: str | None = None  # folder of a frozen policy that a loss learns from

    def __post_init__(self) -> None:
        one_of("source", self.source, SOURCES)
        one_of("loss_agg_mode", self.loss_agg_mode, MODES)
        one_of("kl_loss_type", self.kl_loss_type, KL_KINDS)
        one_of("old_logprob", self.old_logprob, OLD_LOGPROB)
        at_least("train_batch_size", self.train_batch_size, 1)
        at_least("ppo_epochs", self.ppo_epochs, 1)
        if self.loss_scale_factor is not None:
            more_than("loss_scale_factor", self.loss_scale_factor, 0)
        elif self.loss_agg_mode == SEQ_MEAN_TOKEN_SUM_NORM:
            raise ConfigError(
                key="loss_scale_factor",
                got=None,
                because=f"{SEQ_MEAN_TOKEN_SUM_NORM} divides by a constant",
                fix="Use ${rollout.max_response_length}, or another loss_agg_mode",
            )
        if self.reads_sampler and not self.is_sampled:
            raise ConfigError(
                key="old_logprob", got=self.old_logprob, because=f"{self.source} were not sampled", fix="Use recompute"
            )
        if self.use_kl_loss and self.kl_loss_type == "k1":
            raise ConfigError(
                key="kl_loss_type",
                got="k1",
                because="as a loss its expected gradient is 0, so it would pull nowhere",
                fix="Use kl_loss_type=k2 or k1+ (gradient of the reverse KL), or use_kl_in_reward=true",
            )
        if self.rollout_correction.is_on and self.reads_sampler:
            raise ConfigError(
                key="rollout_correction.mode",
                got=self.rollout_correction.mode,
                because=f"with old_logprob={self.old_logprob} there is no second opinion to compare the sampler's with",
                fix="Use old_logprob=recompute, or rollout_correction.mode=none",
            )
        if not self.is_sampled:
            self._refuse_without_rollouts()

    @property
    def is_sampled(self) -> bool:
        """Whether a policy made the responses; otherwise somebody wrote them."""
        return self.source == ROLLOUTS

    @property
    def reads_sampler(self) -> bool:
        """Whether the sampler's log-probabilities stand for those of the policy that starts the update."""
        return self.old_logprob in ("sampler", "available")

    def for_stored_rollouts(self) -> AlgorithmConfig:
        """The same where responses were drawn long ago: ``auto`` then means ``available``, and else ``recompute``.

        A correction compares the two, so with it the trainer's own are needed.
        """
        is_open = self.old_logprob == "auto" and self.is_sampled and not self.rollout_correction.is_on
        return replace(self, old_logprob="available") if is_open else self

    def weights(self, batch: MicroBatch, totals: StepTotals) -> Tensor:
        """[N] what each loss token of a micro-batch counts for in the loss of the whole step."""
        return token_weights(
            self.loss_agg_mode,
            sequence=batch.sequence,
            loss_tokens=batch.loss_tokens,
            group_tokens=batch.group_tokens,
            totals=totals,
            loss_scale_factor=self.loss_scale_factor,
        )

    def _refuse_without_rollouts(self) -> None:
        for name, is_on, because in (
            ("use_kl_loss", self.use_kl_loss, "the KL is estimated on tokens that the policy drew"),
            ("use_kl_in_reward", self.use_kl_in_reward, f"{self.source} have no reward"),
            ("filter_groups.enable", self.filter_groups.enable, f"{self.source} cannot be sampled again"),
            ("overlong_buffer.enable", self.overlong_buffer.enable, f"{self.source} have no reward"),
        ):
            if is_on:
                raise ConfigError(key=name, got=True, because=because, fix="Use false")
        if self.rollout_correction.is_on:
            raise ConfigError(
                key="rollout_correction.mode",
                got=self.rollout_correction.mode,
                because=f"{self.source} were not sampled by any policy",
                fix="Use none",
            )


@dataclass(frozen=True)
class Objective:
    """The loss of the menu with its additions; the same for every micro-batch.

    Args:
        loss: of each token.
        settings: what is added to it, and how tokens become one number.
        label: the first part of the names of its metrics.
    """

    loss: Loss
    settings: AlgorithmConfig
    label: str = "actor"

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must give entropies."""
        return self.settings.entropy_coeff != 0 or self.settings.log_entropy

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy must score the samples."""
        return self.settings.use_kl_loss or self.settings.use_kl_in_reward or self.needs("ref_logprob")

    @property
    def needs_old_logprob(self) -> bool:
        """Whether the policy that starts the update must score the samples."""
        return self.needs("old_logprob") or self.settings.use_kl_in_reward or self.settings.rollout_correction.is_on

    @property
    def ignores_zero_advantage(self) -> bool:
        """Whether samples with an advantage of 0 on every token are left out of the update.

        The loss must promise that they have no gradient, and nothing else in the objective may give them one. With KL
        in the reward advantages are known only after every sample was scored, so none is left out. Metrics per token
        (clip fractions, ``ppo_kl``, ``entropy``) are then means over the tokens that were trained on; ``pg_loss`` and
        ``loss`` are what they would be, because such a sample adds 0 to them.
        """
        s = self.settings
        is_alone = s.entropy_coeff == 0 and not s.use_kl_loss and not s.use_kl_in_reward
        return s.skip_zero_advantage and is_alone and self.loss.zero_at_zero_advantage

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

    def over(self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None) -> MicroBatchObjective:
        """The objective of one micro-batch, ready to be given log-probabilities.

        Where ``sequence`` ranks cut a row, each has the tokens of its own slice: shares and metrics add up over them.
        """
        return MicroBatchObjective(self, batch, totals, self.settings.weights(batch, totals), sequence)


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
            self._over_slices = itself if sequence is None else sequence.sum_over_slices
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
        settings, batch, weight = self.objective.settings, self.batch, self.weight[part]
        inputs = LossInputs.of(batch, logprob, part, self._over_slices)
        policy = self.objective.loss(inputs)
        loss = policy.loss if batch.rollout_weight is None else policy.loss * batch.rollout_weight[part]  # [C]
        metrics = {"pg_loss": share(loss, weight)}
        metrics |= {name: per_token(value) for name, value in policy.metrics.items()}
        metrics |= {name: share(value, weight) for name, value in policy.shares.items()}
        if entropy is not None:
            metrics["entropy"] = per_token(entropy)
            if settings.entropy_coeff != 0:
                loss = loss - settings.entropy_coeff * entropy
        if settings.use_kl_loss:
            assert inputs.ref_logprob is not None, "use_kl_loss needs reference log-probabilities"
            kl = kl_per_token(logprob, inputs.ref_logprob, settings.kl_loss_type)
            loss = loss + settings.kl_loss_coef * kl
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
