"""The critic: its configuration, and the objectives of a separate value model and of a value head on the policy.

The value loss is aggregated like the policy loss; its formula is in ``ops/value.py``. Returns are computed in
``experience/advantage_stage.py``, the models are in ``models/value.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import MicroBatchObjective, Objective, per_token, share
from rlmodule.core.config import at_least, more_than
from rlmodule.core.contract import SequenceRanks
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import Metric, merge
from rlmodule.core.types import MicroBatch, StepTotals
from rlmodule.ops.aggregate import aggregate
from rlmodule.ops.value import value_loss
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.parts.config import OptimizerConfig


@dataclass(frozen=True)
class CriticConfig:
    """Value-function config; keys marked ``shared`` or ``separate`` apply to that value of ``model.value`` only."""

    clip_range: float | None = 0.5  # largest change of a value per iteration that has a gradient; null: none
    coef: float = 0.5  # shared: weight of the value loss added to the policy loss
    path: str | None = None  # separate: initial weights, may be a reward model; null: those of the policy
    architecture: dict[str, Any] = field(default_factory=dict)  # separate: a randomly initialised model instead
    mini_batch_size: int | None = None  # separate: samples per optimizer step; null: as for the policy
    warmup_iterations: int = 0  # separate: first iterations, in which only the critic trains
    optimizer: OptimizerConfig = field(default_factory=AdamW)  # separate: its own optimizer

    def __post_init__(self) -> None:
        if self.clip_range is not None:
            more_than("clip_range", self.clip_range, 0)
        at_least("coef", self.coef, 0)
        at_least("warmup_iterations", self.warmup_iterations, 0)
        if self.mini_batch_size is not None:
            at_least("mini_batch_size", self.mini_batch_size, 1)
        if self.path is not None and self.architecture:
            raise ConfigError(
                key="path",
                got=self.path,
                because="a value model comes either from a path or from an architecture",
                fix="Leave out critic.path or critic.architecture",
            )


@dataclass(frozen=True)
class CriticObjective:
    """Objective of a separate value model: the value loss, aggregated like the policy loss."""

    label: ClassVar[str] = "critic"
    selects: ClassVar[None] = None

    config: CriticConfig
    algorithm: AlgorithmConfig

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> CriticLoss:
        """The value loss of one micro-batch, a function of its values."""
        return CriticLoss(self.config.clip_range, batch, totals, self.algorithm.weights(batch, totals))


@dataclass(frozen=True)
class JointObjective:
    """Objective of a policy with a value head: policy loss plus value loss."""

    label: ClassVar[str] = "actor"

    policy: Objective
    critic: CriticObjective

    @property
    def selects(self) -> Any:
        """The policy loss if it selects tokens over the whole mini-batch, else None."""
        return self.policy.selects

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> JointLoss:
        """Both losses of one micro-batch, functions of the outputs of the model."""
        return JointLoss(
            self.policy.for_micro_batch(batch, totals, sequence),
            self.critic.for_micro_batch(batch, totals, sequence),
            self.critic.config.coef,
        )


class CriticLoss:
    """The value loss of one micro-batch as a callback of the forward pass.

    Args:
        clip_range: clip range of the value loss.
        batch: the micro-batch.
        totals: counts of its mini-batch.
        weight: [N] weight of each loss token.
    """

    def __init__(self, clip_range: float | None, batch: MicroBatch, totals: StepTotals, weight: Tensor) -> None:
        self.clip_range, self.batch, self.totals, self.weight = clip_range, batch, totals, weight
        self.metrics: dict[str, Metric] = {}

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values (with gradient) -> scalar for ``backward``."""
        batch = self.batch
        assert batch.returns is not None, "the value loss needs returns"
        assert batch.old_value is not None, "the value loss needs old_value"
        token_loss = value_loss(value, batch.returns, batch.old_value, self.clip_range)
        self.metrics = {"critic/vf_loss": share(token_loss.loss, self.weight)}
        self.metrics |= {f"critic/{name}": per_token(metric) for name, metric in token_loss.metrics.items()}
        return aggregate(token_loss.loss, self.weight, self.totals)


class JointLoss:
    """The losses of one micro-batch of a policy with a value head, as callbacks of the forward pass.

    Args:
        policy, critic: the two losses.
        coef: weight of the value loss.
    """

    def __init__(self, policy: MicroBatchObjective, critic: CriticLoss, coef: float) -> None:
        self.policy, self.critic, self.coef = policy, critic, coef
        self.needs_entropy, self.whole_sequences = policy.needs_entropy, policy.whole_sequences

    @property
    def metrics(self) -> dict[str, Metric]:
        """Policy and value metrics, merged."""
        return merge([self.policy.metrics, self.critic.metrics])

    def __call__(
        self, logprob: Tensor, entropy: Tensor | None, part: slice, top_logprob: Tensor | None = None
    ) -> Tensor:
        """[C] log-probabilities and entropies of the tokens ``part`` -> scalar policy loss."""
        return self.policy(logprob, entropy, part, top_logprob)

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values -> scalar value loss times ``coef``."""
        return self.coef * self.critic.of_values(value)
