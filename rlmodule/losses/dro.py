"""Policy gradient with a quadratic leash to the old policy, sound for responses of any origin."""

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

    Loss ``-(A * logprob - beta / 2 * (logprob - old_logprob)^2)``. No ratio stands in it, so it needs no clip; the
    leash pulls back to the old policy, also where the advantage is 0.

    Metrics: ``leash`` its quadratic term, ``ppo_kl`` old minus new log-probability in nats.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprob", "advantage"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    beta: float = 0.1  # weight of the leash

    def __post_init__(self) -> None:
        more_than("beta", self.beta, 0)

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens -> [N] losses and metrics."""
        assert x.old_logprob is not None, "dro needs old_logprob"
        assert x.advantage is not None, "dro needs advantage"
        log_ratio = x.logprob - x.old_logprob
        leash = 0.5 * self.beta * log_ratio.square()
        return TokenLoss(
            loss=leash - x.advantage * x.logprob, metrics={"leash": leash.detach(), "ppo_kl": -log_ratio.detach()}
        )
