"""REINFORCE: the policy gradient without ratio and without clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES


@LOSSES.register
@dataclass(frozen=True)
class Reinforce:
    """Loss ``-A * logprob`` (Williams 1992; also the loss of GPG, arXiv:2504.02546).

    Unbiased for responses of the current policy. With several mini-batches per iteration the later ones are slightly
    off-policy, and nothing corrects for it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses."""
        assert x.advantage is not None, "reinforce needs advantage"
        return TokenLoss(loss=-x.advantage * x.logprob)
