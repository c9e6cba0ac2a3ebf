"""How tokens are drawn: the settings that every engine obeys, and the draw itself for engines that have the logits.

Random numbers are keyed by (seed, sample id, position), so neither the process that draws a token nor the samples
beside it change it. Leaves out models and caches (``rollout/``) and where a response ends (``data/end_tokens.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlmodule.core.config import at_least, at_most, more_than
from rlmodule.core.errors import ConfigError

BLOCK = 128  # tokens whose probabilities are summed up together


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled, whatever the engine; the keys stand in the ``rollout`` section beside the engine's."""

    n: int = 8  # responses per prompt
    temperature: float = 1.0  # divides the logits of every pass, also of training
    top_k: int = 0  # draw from the k likeliest tokens; 0 for all
    top_p: float = 1.0  # draw from the smallest set of tokens with this mass
    max_response_length: int = 16  # tokens of a response, all its turns together; longer ones are cut
    stop: list[str] = field(default_factory=list)  # texts that end a response, beside its end tokens; they stay in it
    stop_token_ids: list[int] = field(default_factory=list)  # token ids that end a response, beside its end tokens

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)
        at_least("top_k", self.top_k, 0)
        at_least("max_response_length", self.max_response_length, 1)
        more_than("top_p", self.top_p, 0)
        at_most("top_p", self.top_p, 1)
        if not self.temperature > 0:
            raise ConfigError(
                key="temperature",
                got=self.temperature,
                because="log-probabilities are divided by it in every pass",
                fix="Use rollout.temperature=1.0 to sample; validation is greedy anyway",
            )
        if "" in self.stop:
            raise ConfigError(
                key="stop", got=self.stop, because="an empty text would end every response", fix="Leave it out"
            )
        for token in self.stop_token_ids:
            at_least("stop_token_ids", token, 0)

    @property
    def draws_from_policy(self) -> bool:
        """Whether rollout log-probabilities are those of the policy itself (no top-k, no top-p)."""
        return self.truncation.keeps_all

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be drawn."""
        return Truncation(self.top_k, self.top_p)


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


@dataclass(frozen=True, eq=False)
class Distribution:
    """What the next token of each row is drawn from, kept so that drawing reads the vocabulary once.

    Args:
        weights: [B, V] probabilities, up to rounding of their sum.
        blocks: [B, C] float64, sums of ``weights`` up to the end of each block of ``BLOCK`` tokens.
    """

    weights: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Distribution:
        """The softmax of [B, V] logits."""
        weights = logits.softmax(dim=-1)
        whole = weights.shape[-1] // BLOCK * BLOCK
        # A block is summed in the type of its weights: a sum in float64 would copy the whole vocabulary first.
        sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
        if whole < weights.shape[-1]:
            sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
        return cls(weights, sums.double().cumsum(dim=-1))

    def tokens_at(self, uniform: Tensor) -> Tensor:
        """[B] numbers in [0, 1) -> [B] int64 tokens by inverting the cumulative distribution.

        The block is found first, then the token in it. A token of probability 0 is never drawn.
        """
        target = uniform[:, None] * self.blocks[:, -1:]
        block = _first_above(self.blocks, target)
        start = torch.where(block > 0, self.blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
        tokens = block * BLOCK + torch.arange(BLOCK, device=uniform.device)  # [B, BLOCK]
        exists = tokens < self.weights.shape[-1]
        within = self.weights.gather(1, torch.where(exists, tokens, 0)).double().masked_fill(~exists, 0.0)
        return (block * BLOCK + _first_above(within.cumsum(dim=-1), target - start)).squeeze(1)

    def logprob_of(self, tokens: Tensor) -> Tensor:
        """[B] float32 log-probability of each row's token."""
        weight = self.weights.gather(1, tokens[:, None]).double()
        return (weight.log() - self.blocks[:, -1:].log()).squeeze(1).float()


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[B, 1] first column of the non-decreasing [B, C] above ``target`` [B, 1]; the last that adds anything if none."""
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
