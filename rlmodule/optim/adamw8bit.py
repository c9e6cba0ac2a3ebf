"""AdamW with moments of 8 bits, a quarter of the bytes; the kernels are bitsandbytes'."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from rlmodule.core.config import at_least, more_than
from rlmodule.core.errors import DependencyError
from rlmodule.core.parameters import EIGHT_BIT_FROM
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.parts.config import OptimizerConfig, check_betas
from rlmodule.optim.parts.decay import groups_by_decay
from rlmodule.optim.parts.eight_bit import EightBitAdamW


@OPTIMIZERS.register
@dataclass(frozen=True)
class AdamW8bit(OptimizerConfig):
    """AdamW whose moments are quantised in blocks of 256 by a dynamic map (arXiv:2110.02861).

    Moments of small weights stay in float32. The blocks run over a whole weight, so every process must hold it.
    """

    needs_whole_weights: ClassVar[bool] = True
    state_bytes: ClassVar[int] = 2

    betas: tuple[float, float] = (0.9, 0.95)  # decay rates of the two moments per step
    eps: float = 1e-8  # added to the root of the second moment
    eight_bit_from: int = 4096  # elements; the moments of a weight with fewer are float32

    def __post_init__(self) -> None:
        super().__post_init__()
        more_than("eps", self.eps, 0)
        at_least("eight_bit_from", self.eight_bit_from, 1)
        check_betas(self.betas)

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], decayed: Collection[str], hidden: Collection[str] = ()
    ) -> Optimizer:
        """Build the optimizer.

        Raises:
            DependencyError: bitsandbytes is not installed.
        """
        if importlib.util.find_spec("bitsandbytes") is None:
            raise DependencyError(package="bitsandbytes", needed_by="optimizer=adamw8bit", extra="eight_bit")
        groups = groups_by_decay(parameters, decayed, self.weight_decay)
        return EightBitAdamW(
            [{**group, EIGHT_BIT_FROM: self.eight_bit_from} for group in groups],
            lr=self.peak_lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
        )
