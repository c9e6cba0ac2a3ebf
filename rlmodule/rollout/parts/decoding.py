"""Responses that are drawn side by side in a training process: what was drawn of each, and the next token of each.

Leaves out the model and its cache (``rollout/hf.py``) and how one token is drawn (``sampling.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from rlmodule.core.episodes import LENGTH, STOP, GenerationRequest
from rlmodule.ops.random import uniform_of_token
from rlmodule.rollout.parts.lock_step import LockStep
from rlmodule.rollout.parts.sampling import Distribution, Truncation

if TYPE_CHECKING:  # types alone
    from rlmodule.data.end_tokens import EndTokens


@dataclass(eq=False)
class DecodingRows:
    """``B`` responses, some of which may have ended.

    Args:
        seeds, sample_ids, first_positions: [B] int64, keys of the random numbers.
        greedy: [B] bool.
        max_tokens: [B] int64, tokens of each response at most.
        tokens, logprobs: [B, largest of max_tokens] what was drawn so far.
        lengths: [B] int64, tokens of each response.
        stopped: [B] bool, whether it ended by itself.
    """

    seeds: Tensor
    sample_ids: Tensor
    first_positions: Tensor
    greedy: Tensor
    max_tokens: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor

    @classmethod
    def start(cls, requests: Sequence[GenerationRequest], device: torch.device) -> DecodingRows:
        """Responses before their first token."""
        count, limit = len(requests), max(r.max_tokens for r in requests)
        return cls(
            seeds=torch.tensor([r.seed for r in requests], device=device),
            sample_ids=torch.tensor([r.sample_id for r in requests], device=device),
            first_positions=torch.tensor([r.first_position for r in requests], device=device),
            greedy=torch.tensor([r.greedy for r in requests], device=device),
            max_tokens=torch.tensor([r.max_tokens for r in requests], device=device),
            tokens=torch.zeros(count, limit, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, limit, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
        )

    def response(self, row: int) -> tuple[int, Tensor, Tensor, str]:
        """(sample id, [R] ids, [R] log-probabilities, finish reason) of one response, on the host."""
        length = int(self.lengths[row])
        finish_reason = STOP if bool(self.stopped[row]) else LENGTH
        ids, logprobs = self.tokens[row, :length].cpu(), self.logprobs[row, :length].cpu()
        return int(self.sample_ids[row]), ids, logprobs, finish_reason

    def joined(self, mine: Tensor, other: DecodingRows, theirs: Tensor) -> DecodingRows:
        """Rows ``mine`` of these, then rows ``theirs`` of the other."""
        limit = max(self.tokens.shape[1], other.tokens.shape[1])
        parts = [(self, mine), (other, theirs)]
        return DecodingRows(
            **{
                name.name: torch.cat([_as_wide(getattr(rows, name.name)[chosen], limit) for rows, chosen in parts])
                for name in fields(self)
            }
        )


def _as_wide(tensor: Tensor, width: int) -> Tensor:
    """[b] as it is, [b, n] with zeros up to ``width``."""
    return tensor if tensor.ndim == 1 else functional.pad(tensor, (0, width - tensor.shape[1]))


@dataclass(eq=False)
class DecodingBatch:
    """Responses being drawn side by side, of which ``b`` are still growing.

    Args:
        truncation: which tokens may be drawn.
        scale: factor on the model's logits.
        end_tokens: where a response ends.
        tokenizer: spells texts that end one.
        rows: all responses, those that have ended among them.
        live: [b] int64, rows of the responses still growing.
        last: [b] int64, the token that each of them ends with so far.
        lock_step: ranks that draw the same responses together; None where this one draws them alone.
    """

    truncation: Truncation
    scale: float
    end_tokens: EndTokens
    tokenizer: PreTrainedTokenizerBase
    rows: DecodingRows
    live: Tensor
    lock_step: LockStep | None = None
    last: Tensor = field(init=False)
    end_ids: Tensor = field(init=False)
    has_greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        self.last = torch.zeros_like(self.live)
        self.end_ids = torch.tensor(self.end_tokens.ids, device=self.live.device)
        self.has_greedy = bool(self.rows.greedy.any())

    def draw(self, logits: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Draw one token for each live row, or for those at ``chosen`` [b]; returns [b] bool, which of them go on.

        Args:
            logits: [b, V] of the model; overwritten.
            chosen: places among the live rows; None for all.
        """
        live, rows = self.live if chosen is None else self.live[chosen], self.rows
        place = rows.lengths[live]
        uniform = uniform_of_token(rows.seeds[live], rows.sample_ids[live], rows.first_positions[live] + place)
        logits = logits if self.scale == 1.0 else logits.mul_(self.scale)
        if self.has_greedy:
            tokens, logprobs = self._greedy_or_drawn(logits, rows.greedy[live], uniform)
        else:
            distribution = Distribution.of(self.truncation(logits))
            tokens = distribution.tokens_at(uniform)
            logprobs = distribution.logprob_of(tokens)
        if self.lock_step is not None:
            tokens, logprobs = self.lock_step.drawn(tokens, logprobs)
        if chosen is None:
            self.last = tokens
        else:
            self.last[chosen] = tokens
        rows.tokens[live, place] = tokens
        rows.logprobs[live, place] = logprobs
        rows.lengths[live] += 1
        stopped = torch.isin(tokens, self.end_ids)
        if self.end_tokens.texts:
            stopped |= self._spelled(live)
        rows.stopped[live] = stopped
        return ~stopped & (rows.lengths[live] < rows.max_tokens[live])

    def _greedy_or_drawn(self, logits: Tensor, greedy: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """[b] tokens and their log-probabilities; a greedy row takes the likeliest of the whole vocabulary."""
        likeliest = logits.argmax(-1)
        allowed = torch.where(greedy[:, None], logits, self.truncation(logits))
        distribution = Distribution.of(allowed)
        tokens = torch.where(greedy, likeliest, distribution.tokens_at(uniform))
        return tokens, distribution.logprob_of(tokens)

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` [m] of the live ones only, in this order."""
        self.live, self.last = self.live[rows], self.last[rows]

    def join(self, other: DecodingBatch, rows: Tensor) -> None:
        """Take in the responses of ``other``; those that have ended here are forgotten.

        ``rows`` [m] says which of the live ones of both, counted on from these into those, comes where.
        """
        assert (self.truncation, self.scale) == (other.truncation, other.scale), "one call of generate draws in one way"
        self.rows = self.rows.joined(self.live, other.rows, other.live)
        self.last = torch.cat([self.last, other.last])[rows]
        self.live = rows
        self.has_greedy |= other.has_greedy

    def _spelled(self, live: Tensor) -> Tensor:
        """[b] bool, whether each of these rows has come to spell one of the texts that end it."""
        ids = [self.rows.tokens[row, : self.rows.lengths[row]].tolist() for row in live.tolist()]
        spelled = [self.end_tokens.spelled(of_row, self.tokenizer) for of_row in ids]
        return torch.tensor(spelled, device=self.live.device)
