"""DRO: policy gradient with a quadratic penalty on the log-ratio to the old policy; works off-policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlmodule.core.config import more_than
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES


@LOSSES.register
@dataclass(frozen=True)
class DRO:
    """Direct reward optimisation per token (arXiv:2405.19107), with the advantage in place of reward minus value.

    Loss ``-(A * logprob - beta / 2 * (logprob - old_logprob)^2)``. It contains no importance ratio, so nothing is
    clipped. The penalty has a gradient also where the advantage is 0.

    Metrics: ``leash`` the quadratic term, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # weight of the quadratic penalty

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "dro needs old_logprob"
        assert x.advantage is not None, "dro needs advantage"
        log_ratio = x.logprob - x.old_logprob
        penalty = 0.5 * self.beta * log_ratio.square()
        return TokenLoss(
            loss=penalty - x.advantage * x.logprob, metrics={"leash": penalty.detach(), "ppo_kl": -log_ratio.detach()}
        )
