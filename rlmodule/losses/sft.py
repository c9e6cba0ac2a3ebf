"""Supervised fine-tuning: negative log-likelihood of the loss tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES


@LOSSES.register
@dataclass(frozen=True)
class SFT:
    """Cross-entropy per token, in nats."""

    needs: ClassVar[frozenset[str]] = frozenset()
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses."""
        return TokenLoss(loss=-x.logprob)
