"""SAPO: a smooth gate instead of the clip; the gradient decays with the distance of the ratio from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlmodule.core.config import more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES
from rlmodule.ops.kl import importance_ratio


@LOSSES.register
@dataclass(frozen=True)
class SAPO:
    """Soft adaptive policy optimisation (arXiv:2511.20347).

    Loss ``-A * 4 / tau * sigmoid(tau (ratio - 1))``, where tau depends on the sign of A. At ratio 1 the gradient is
    that of the policy gradient; it decays on both sides, faster for a larger tau. The paper uses
    ``seq-mean-token-mean``.

    Metrics: ``gate`` gradient relative to that at ratio 1 (1 at ratio 1, near 0 far from it), ``ppo_kl`` old minus new
    log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = True

    tau_positive: float = 1.0  # steepness of the gate where the advantage is positive
    tau_negative: float = 1.05  # steepness of the gate where the advantage is 0 or negative

    def __post_init__(self) -> None:
        more_than("tau_positive", self.tau_positive, 0)
        more_than("tau_negative", self.tau_negative, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "sapo needs old_logprob"
        assert x.advantage is not None, "sapo needs advantage"
        ratio = importance_ratio(x.logprob, x.old_logprob)
        tau = torch.full_like(x.advantage, self.tau_negative).masked_fill(x.advantage > 0, self.tau_positive)
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = (4 * gate * (1 - gate)).detach()
        return TokenLoss(
            loss=-x.advantage * gate * 4 / tau,
            metrics={"gate": slope, "ppo_kl": (x.old_logprob - x.logprob).detach()},
        )
