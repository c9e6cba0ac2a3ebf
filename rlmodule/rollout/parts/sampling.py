"""Drawing tokens: random numbers keyed by (seed, sample, position), so who draws what, and beside whom, is no matter.

Leaves out models and caches (``rollout/``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlmodule.ops.random import uniform_of_token


def uniforms(seeds: np.ndarray, sample_ids: np.ndarray, position: int) -> np.ndarray:
    """[B] float64 in [0, 1): a function of (seed, sample id, position) and nothing else."""
    seed, sample_id = (torch.from_numpy(values.astype(np.int64)) for values in (seeds, sample_ids))
    return uniform_of_token(seed, sample_id, position).numpy()


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn: the ``top_k`` likeliest (0: all) within the smallest set of mass ``top_p``."""

    top_k: int = 0
    top_p: float = 1.0

    @property
    def keeps_all(self) -> bool:
        """Whether the sampler draws from the model's own distribution."""
        return self.top_k == 0 and self.top_p >= 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """[B, V] logits -> the same with excluded tokens at minus infinity; the likeliest token always stays."""
        if 0 < self.top_k < logits.shape[-1]:
            floor = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = logits.sort(dim=-1, descending=True)
            probability = ordered.softmax(dim=-1)
            before = probability.cumsum(dim=-1) - probability
            excluded = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            logits = logits.masked_fill(excluded, -torch.inf)
        return logits


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """[B, V] logits and [B] numbers in [0, 1) -> [B] int64 tokens by inverting the cumulative distribution.

    A token of probability 0 is never drawn.
    """
    cumulative = logits.softmax(dim=-1).double().cumsum(dim=-1)  # [B, V]
    target = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def logprob_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """[B] fp32 log-probability of each row's token."""
    return logits.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
