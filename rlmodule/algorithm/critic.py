"""What a value function minimises, alone or on the policy's trunk: the value loss, weighed like the policy's.

Leaves out the maths (``ops/value.py``), where returns come from (``experience/advantage_stage.py``) and the models
(``models/value.py``).
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
from rlmodule.optim.adamw import OptimizerConfig


@dataclass(frozen=True)
class CriticConfig:
    """The value function, where ``model.value`` asks for one. What only one of the two kinds reads says so."""

    clip_range: float | None = 0.5  # how far a value may move in one iteration and still have a gradient; null: any way
    coef: float = 0.5  # shared: weight of the value loss beside the policy loss
    path: str | None = None  # separate: weights it starts from, a reward model's too; null: what the policy starts from
    architecture: dict[str, Any] = field(default_factory=dict)  # separate: a random model of another size instead
    mini_batch_size: int | None = None  # separate: samples of one of its optimizer steps; null: as the policy's
    warmup_iterations: int = 0  # separate: iterations at the start in which it trains and the policy does not
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))  # separate: its own AdamW

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
    """The value loss of a model that says nothing else, aggregated like the policy loss."""

    label: ClassVar[str] = "critic"
    selects: ClassVar[None] = None

    config: CriticConfig
    algorithm: AlgorithmConfig

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> CriticLoss:
        """The value loss of one micro-batch, ready to be given values."""
        return CriticLoss(self.config.clip_range, batch, totals, self.algorithm.weights(batch, totals))


@dataclass(frozen=True)
class JointObjective:
    """Policy loss and value loss of one model with two heads."""

    label: ClassVar[str] = "actor"

    policy: Objective
    critic: CriticObjective

    @property
    def selects(self) -> Any:
        """The policy loss, where it picks tokens out of the whole mini-batch."""
        return self.policy.selects

    def for_micro_batch(
        self, batch: MicroBatch, totals: StepTotals, sequence: SequenceRanks | None = None
    ) -> JointLoss:
        """Both losses of one micro-batch."""
        return JointLoss(
            self.policy.for_micro_batch(batch, totals, sequence),
            self.critic.for_micro_batch(batch, totals, sequence),
            self.critic.config.coef,
        )


class CriticLoss:
    """What a value model's forward pass is given to turn values into a loss.

    Args:
        clip_range: of the value loss.
        batch: the micro-batch.
        totals: counts of its mini-batch.
        weight: [N] what each token counts for.
    """

    def __init__(self, clip_range: float | None, batch: MicroBatch, totals: StepTotals, weight: Tensor) -> None:
        self.clip_range, self.batch, self.totals, self.weight = clip_range, batch, totals, weight
        self.metrics: dict[str, Metric] = {}

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values (with gradient) -> scalar to call backward on."""
        batch = self.batch
        assert batch.returns is not None, "a value function learns returns"
        assert batch.old_value is not None, "a value function is held to where it was"
        made = value_loss(value, batch.returns, batch.old_value, self.clip_range)
        self.metrics = {"critic/vf_loss": share(made.loss, self.weight)}
        self.metrics |= {f"critic/{name}": per_token(metric) for name, metric in made.metrics.items()}
        return aggregate(made.loss, self.weight, self.totals)


class JointLoss:
    """Both objectives for a model with two heads, which asks each for its part.

    Args:
        policy, critic: the two.
        coef: weight of the value loss.
    """

    def __init__(self, policy: MicroBatchObjective, critic: CriticLoss, coef: float) -> None:
        self.policy, self.critic, self.coef = policy, critic, coef
        self.needs_entropy, self.whole_sequences = policy.needs_entropy, policy.whole_sequences

    @property
    def metrics(self) -> dict[str, Metric]:
        """Of both."""
        return merge([self.policy.metrics, self.critic.metrics])

    def __call__(self, logprob: Tensor, entropy: Tensor | None, part: slice) -> Tensor:
        """[C] log-probabilities and entropies of the tokens ``part`` -> scalar."""
        return self.policy(logprob, entropy, part)

    def of_values(self, value: Tensor) -> Tensor:
        """[N] values -> scalar."""
        return self.coef * self.critic.of_values(value)
