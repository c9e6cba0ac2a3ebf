"""Distillation on distributions: at each token the divergence from a teacher over its likeliest next tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.config import at_least, at_most, more_than, one_of
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import LossInputs, TokenLoss
from rlmodule.losses import LOSSES

# Least mass of a tail: 1 - (sum of float32 probabilities) is rounding below it.
LEAST_TAIL = 1e-6

# (log-probabilities of the teacher, of the student, beta), [N, K] each -> [N] divergence
DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda teacher, student, beta: kl(teacher, student),
    "reverse_kl": lambda teacher, student, beta: kl(student, teacher),
    "jsd": lambda teacher, student, beta: jensen_shannon(teacher, student, beta),
}


@LOSSES.register
@dataclass(frozen=True)
class DistillTopK:
    """Divergence between teacher and student over the teacher's K likeliest tokens and, as one more class, all others.

    - ``forward_kl``: KL(teacher || student) = sum of p_T (log p_T - log p_S).
    - ``reverse_kl``: KL(student || teacher).
    - ``jsd``: beta KL(teacher || M) + (1 - beta) KL(student || M) with M = beta teacher + (1 - beta) student
      (arXiv:2306.13649).

    Merging all other tokens into one class makes each at most the divergence over the whole vocabulary. With
    ``tail=false`` that class is left out; the forward KL may then be negative. The prefixes may be the student's own
    responses or demonstrations. The gradient is that of the policy as it is now; it needs no ratio to an earlier one.

    Metrics: ``teacher_kl`` the forward KL in nats, whichever divergence is minimised; ``teacher_top_mass``,
    ``student_top_mass`` the probability of the K tokens under each.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"teacher_top_logprob", "top_logprob"})
    whole_sequences: ClassVar[bool] = False
    zero_at_zero_advantage: ClassVar[bool] = False

    top_k: int = 64  # likeliest tokens of the teacher at each position
    tail: bool = True  # all other tokens are one more class
    divergence: str = "forward_kl"  # forward_kl, reverse_kl or jsd
    beta: float = 0.5  # jsd: share of the teacher in the mixture

    def __post_init__(self) -> None:
        at_least("top_k", self.top_k, 1)
        one_of("divergence", self.divergence, DIVERGENCES)
        more_than("beta", self.beta, 0)
        at_most("beta", self.beta, 1)
        if self.beta == 1:
            raise ConfigError(key="beta", got=1.0, because="the mixture is then the teacher alone", fix="Use beta=0.5")
        if not self.tail and self.divergence != "forward_kl":
            raise ConfigError(
                key="tail",
                got=False,
                because=f"without it {self.divergence} falls when the student leaves the teacher's likeliest tokens",
                fix="Use tail=true, or divergence=forward_kl",
            )

    def __call__(self, x: LossInputs) -> TokenLoss:
        """[N] loss tokens with [N, K] log-probabilities -> [N] losses and metrics."""
        assert x.teacher_top_logprob is not None, "distill_topk needs teacher_top_logprob"
        assert x.top_logprob is not None, "distill_topk needs top_logprob"
        teacher, student = x.teacher_top_logprob.to(x.top_logprob.dtype), x.top_logprob
        masses = {
            "teacher_top_mass": teacher.exp().sum(-1),
            "student_top_mass": student.detach().exp().sum(-1),
        }
        if self.tail:
            teacher, student = with_tail(teacher), with_tail(student)
        loss = DIVERGENCES[self.divergence](teacher, student, self.beta)
        return TokenLoss(loss=loss, metrics={"teacher_kl": kl(teacher, student.detach()), **masses})


def with_tail(logprob: Tensor) -> Tensor:
    """[N, K] log-probabilities of some tokens -> [N, K+1], the last of all other tokens together."""
    tail = (1 - logprob.exp().sum(-1, keepdim=True)).clamp(min=LEAST_TAIL).log()
    return torch.cat([logprob, tail], -1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """[N, K] log-probabilities of the same classes -> [N] sum of p (log p - log q); differentiable in both."""
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """[N, K] log-probabilities -> [N] beta KL(p || m) + (1 - beta) KL(q || m), m the mixture with share beta of p."""
    share = torch.tensor(beta, dtype=p.dtype, device=p.device)
    mixture = torch.logaddexp(p + share.log(), q + (-share).log1p())
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
