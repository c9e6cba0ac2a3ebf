"""Settings that all optimizers have: learning rate, weight decay, schedule and gradient clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from rlmodule.core.config import at_least, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.optim.parts.decay import decayed_parameters
from rlmodule.optim.parts.hidden import hidden_matrices

SCHEDULES = CONSTANT, LINEAR, COSINE = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig(ABC):
    """Base of all optimizers; a subclass adds its own settings and builds the optimizer.

    ``needs_matrices`` says that it makes the update of a weight from the whole matrix, ``needs_whole_weights`` that
    every process must hold all of it.
    """

    needs_matrices: ClassVar[bool] = False
    needs_whole_weights: ClassVar[bool] = False

    state_bytes: ClassVar[int] = 8  # of the states for each trained parameter, for planning: two fp32 moments

    lr: float | None = None  # peak learning rate; null: the one that fits the model (the keys of model)
    weight_decay: float = 0.0  # decoupled; not applied to biases, norms and other parameters that are no weights
    warmup_steps: int = 5  # optimizer steps from 0 to lr
    schedule: str = CONSTANT  # after warm-up: constant, linear or cosine
    min_lr_ratio: float = 0.0  # the schedule ends at this share of lr
    total_steps: int | None = None  # optimizer steps of the schedule; None: those of the whole run
    max_grad_norm: float = 1.0  # clip the global gradient norm to it; 0: no clipping

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        if self.lr is not None:
            at_least("lr", self.lr, 0)
        for name in ("weight_decay", "warmup_steps", "min_lr_ratio", "max_grad_norm"):
            at_least(name, getattr(self, name), 0)
        if self.total_steps is not None:
            at_least("total_steps", self.total_steps, 1)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate of an optimizer that is built; ``run/learning_rate.py`` has filled it in."""
        assert self.lr is not None, "an optimizer that is built has a learning rate"
        return self.lr

    @abstractmethod
    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], hidden: Collection[str]
    ) -> Optimizer:
        """Build the optimizer over all parameters with ``requires_grad``.

        Args:
            parameters: (name, parameter) of a model, possibly sharded.
            decayed: names of the parameters that weight decay applies to, see ``decayed_parameters``.
            hidden: names of the matrices of hidden layers, see ``hidden_matrices``.
        """

    def build_for(self, model: nn.Module) -> Optimizer:
        """Build the optimizer of a model that is not sharded."""
        return self.build(model.named_parameters(), decayed_parameters(model), hidden_matrices(model))


def check_betas(betas: Sequence[float]) -> None:
    """Check the decay rates of Adam's two moments.

    Raises:
        ConfigError: they are not two numbers, at least 0 and below 1.
    """
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        because = "two numbers are needed, at least 0 and below 1"
        raise ConfigError(key="betas", got=betas, because=because, fix="Use [0.9,0.95]")
