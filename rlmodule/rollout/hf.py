"""In-process sampling with the policy's own weights: packed prefill of each distinct prompt, then ragged decoding.

No padding token is computed, rows that have ended leave the batch, nothing is copied between a trainer and a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least, more_than
from rlmodule.core.contract import SampleRequest
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import Prompt, Sample
from rlmodule.models.attention import RaggedCache
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.sampling import Truncation, draw, logprob_of, uniforms


@ROLLOUTS.register
@dataclass(frozen=True)
class HFRolloutConfig:
    """Sampling settings; ``connect`` gives the engine."""

    n: int = 8  # responses per prompt
    temperature: float = 1.0  # divides the logits of every pass, also of training
    top_k: int = 0  # draw from the k likeliest tokens; 0 for all
    top_p: float = 1.0  # draw from the smallest set of tokens with this mass
    max_response_length: int = 16  # tokens; longer responses are cut and count as truncated
    max_batch_size: int = 1024  # responses decoded side by side; bounds the key-value cache
    staleness: int = 0  # earlier iterations whose responses are trained on again, weighted by rollout_correction

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)
        at_least("top_k", self.top_k, 0)
        at_least("max_response_length", self.max_response_length, 1)
        at_least("max_batch_size", self.max_batch_size, 1)
        at_least("staleness", self.staleness, 0)
        more_than("top_p", self.top_p, 0)
        if not self.temperature > 0:
            raise ConfigError(
                key="temperature",
                got=self.temperature,
                because="log-probabilities are divided by it in every pass",
                fix="Use rollout.temperature=1.0 to sample; validation is greedy anyway",
            )

    @property
    def draws_from_policy(self) -> bool:
        """Whether sampler log-probabilities are those of the policy itself (no top-k, no top-p)."""
        return Truncation(self.top_k, self.top_p).keeps_all

    def connect(
        self,
        policy: Callable[[], nn.Module],
        eval_mode: Callable[[], AbstractContextManager[None]],
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> HFEngine:
        """The engine for one policy; ``policy`` gives the module to call, ``eval_mode`` the state to call it in."""
        return HFEngine(self, policy, eval_mode, tokenizer, device)


@dataclass(frozen=True, eq=False)
class HFEngine:
    """Draws responses with the connected policy."""

    config: HFRolloutConfig
    policy: Callable[[], nn.Module]
    eval_mode: Callable[[], AbstractContextManager[None]]
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> list[Sample]:
        """One response per request, in order."""
        samples: list[Sample] = []
        with self.eval_mode():
            for first in range(0, len(requests), self.config.max_batch_size):
                samples += self._wave(prompts, requests[first : first + self.config.max_batch_size])
        return samples

    def _wave(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> list[Sample]:
        batch_state = DecodingBatch.start(requests, self.config, stop_ids(self.tokenizer), self.device)
        logits, cache = self._prefill(prompts, requests)
        for tokens in batch_state.run(logits, cache):
            batch_state.logits = self.policy()(DecodeBatch(tokens, cache))
        return [self._sample(prompts[r.prompt], r, *batch_state.response(i)) for i, r in enumerate(requests)]

    def _prefill(self, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> tuple[Tensor, RaggedCache]:
        """Read every distinct prompt once, then give each request its own row."""
        distinct = sorted({r.prompt for r in requests})
        ids = [prompts[p].ids for p in distinct]
        lengths = torch.tensor([len(i) for i in ids])
        ends = lengths.cumsum(0)
        cache = RaggedCache(lengths.to(self.device), int(lengths.max()) + self.config.max_response_length)
        batch = PrefillBatch(
            input_ids=torch.tensor([t for i in ids for t in i], device=self.device),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).to(self.device),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(self.device),
            last=(ends - 1).to(self.device),
            cache=cache,
        )
        logits = self.policy()(batch)
        place = {p: i for i, p in enumerate(distinct)}
        rows = torch.tensor([place[r.prompt] for r in requests], device=self.device)
        cache.repeat(rows)
        return logits.index_select(0, rows), cache

    def _sample(
        self, prompt: Prompt, request: SampleRequest, ids: Tensor, logprob: Tensor, finish_reason: str
    ) -> Sample:
        return Sample(
            sample_id=request.sample_id,
            group_id=request.group_id,
            prompt=prompt,
            response_ids=ids,
            loss_mask=torch.ones_like(ids, dtype=torch.bool),
            rollout_logprob=logprob,
            finish_reason=finish_reason,
            text=str(self.tokenizer.decode(ids, skip_special_tokens=True)),
        )


@dataclass(eq=False)
class DecodingBatch:
    """Responses being drawn side by side.

    Args:
        truncation: which tokens may be drawn.
        limit: tokens of a response at most.
        stop: [K] token ids that end a response.
        seeds, sample_ids: [B] int64 keys of the random numbers.
        greedy: [B] bool.
        live: [b] rows of the responses still growing.
        logits: [b, V] next-token logits of the live rows.
        tokens, logprobs: [B, limit] what was drawn so far.
        lengths: [B] tokens of each response.
        stopped: [B] whether it ended by itself.
    """

    truncation: Truncation
    limit: int
    stop: Tensor
    seeds: np.ndarray
    sample_ids: np.ndarray
    greedy: Tensor
    live: Tensor
    logits: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor

    @classmethod
    def start(
        cls, requests: Sequence[SampleRequest], config: HFRolloutConfig, stop: Sequence[int], device: torch.device
    ) -> DecodingBatch:
        """A wave before its first token."""
        count, limit = len(requests), config.max_response_length
        return cls(
            truncation=Truncation(config.top_k, config.top_p),
            limit=limit,
            stop=torch.tensor(list(stop), device=device),
            seeds=np.array([r.seed for r in requests]),
            sample_ids=np.array([r.sample_id for r in requests]),
            greedy=torch.tensor([r.greedy for r in requests], device=device),
            live=torch.arange(count, device=device),
            logits=torch.empty(0, device=device),
            tokens=torch.zeros(count, limit, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, limit, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
        )

    def run(self, logits: Tensor, cache: RaggedCache) -> Iterator[Tensor]:
        """Draw until every row has ended; yields the [b] tokens to feed and expects new ``logits`` each time."""
        self.logits = logits
        for position in range(self.limit):
            drawn = self._draw(position)
            going = ~torch.isin(drawn, self.stop)
            self.stopped[self.live[~going]] = True
            if position + 1 == self.limit or not bool(going.any()):
                return
            if not bool(going.all()):
                rows = cache.keep(going)
                self.live, drawn = self.live[rows], drawn[rows]
            yield drawn

    def _draw(self, position: int) -> Tensor:
        rows = self.live.cpu().numpy()
        greedy = self.greedy[self.live]
        allowed = self.truncation(self.logits)
        uniform = torch.from_numpy(uniforms(self.seeds[rows], self.sample_ids[rows], position))
        drawn = torch.where(greedy, self.logits.argmax(-1), draw(allowed, uniform))
        self.tokens[self.live, position] = drawn
        self.logprobs[self.live, position] = logprob_of(torch.where(greedy[:, None], self.logits, allowed), drawn)
        self.lengths[self.live] += 1
        return drawn

    def response(self, row: int) -> tuple[Tensor, Tensor, str]:
        """([R] ids, [R] log-probabilities, finish) of one response; a cut one keeps its own last token."""
        length = int(self.lengths[row])
        finish_reason = "stop" if bool(self.stopped[row]) else "length"
        return self.tokens[row, :length].cpu(), self.logprobs[row, :length].cpu(), finish_reason


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response.

    Raises:
        ConfigError: the tokenizer names no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            key="model.tokenizer",
            got=tokenizer.name_or_path,
            because="it has no end-of-sequence token, so no response could ever end",
            fix="Set eos_token in its tokenizer_config.json",
        )
    return [int(tokenizer.eos_token_id)]
