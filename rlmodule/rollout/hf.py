"""In-process sampling with the policy's own weights: packed prefill of each distinct prompt, then ragged decoding.

No padding token is computed, rows that have ended leave the batch, nothing is copied between a trainer and a server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least
from rlmodule.core.episodes import LENGTH, STOP, Completion, GenerationRequest
from rlmodule.core.types import POLICY
from rlmodule.models.attention import RaggedCache
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.ops.random import uniform_of_token
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.sampling import Truncation, draw, logprob_of

if TYPE_CHECKING:  # types alone
    from rlmodule.data.end_tokens import EndTokens


@ROLLOUTS.register
@dataclass(frozen=True)
class HFRolloutConfig:
    """Settings of the in-process engine."""

    max_batch_size: int = 1024  # responses decoded side by side; bounds the key-value cache

    in_process: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("max_batch_size", self.max_batch_size, 1)

    def connect(self, context: EngineContext) -> HFEngine:
        """The engine for the policy of a run."""
        return HFEngine(
            partial(context.strategy.generator, POLICY),
            partial(context.strategy.generation_mode, POLICY),
            context.tokenizer,
            context.device,
            context.end_tokens,
            context.sampling.truncation,
            self.max_batch_size,
            temperature=context.sampling.temperature,
        )


@dataclass(eq=False)
class HFEngine:
    """Samples with the module that is being trained, a batch of requests after the other.

    Args:
        policy: gives the module to call, which may differ from call to call.
        generation_mode: the state to call it in; entered once per ``generate``, on every rank.
        tokenizer: decodes responses.
        device: of the policy.
        end_tokens: where responses end.
        truncation: which tokens may be drawn, where a request does not say otherwise.
        max_batch_size: responses decoded side by side.
        version: iterations that the policy has been trained.
        temperature: that the policy divides its logits by.
    """

    takes_weights: ClassVar[bool] = False

    policy: Callable[[], nn.Module]
    generation_mode: Callable[[], AbstractContextManager[None]]
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    end_tokens: EndTokens
    truncation: Truncation
    max_batch_size: int
    version: int = 0
    temperature: float = 1.0

    def start(self) -> None:
        """The module is there already."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """The module has the weights already; only their version is new."""
        self.version = version

    def close(self) -> None:
        """The module stays."""

    @torch.no_grad()
    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, as soon as it ends; the next batch begins when the last response of one has."""
        waiting = iter(requests)
        with self.generation_mode():
            while batch := self._take(waiting):
                yield from self._run(batch)

    @torch.no_grad()
    def stream(self, request: GenerationRequest) -> Generator[int, None, None]:
        """The tokens of one response, each as soon as it is drawn."""
        with self.generation_mode():
            batch = DecodingBatch.start([request], self.truncation, self.end_tokens, self.tokenizer, self.device)
            logits, cache = self._prefill([request])
            while True:
                goes_on = bool(batch.draw(logits))
                yield int(batch.last)
                if not goes_on:
                    return
                logits = self.policy()(DecodeBatch(batch.last, cache))

    def _take(self, waiting: Iterator[GenerationRequest | None]) -> list[GenerationRequest]:
        """Requests of the next batch; none when there are no more."""
        there = takewhile(lambda request: request is not None, waiting)
        batch = [request for request in islice(there, self.max_batch_size) if request is not None]
        assert all(request.version <= self.version for request in batch), "a request wants newer weights than these"
        return batch

    def _run(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        [drawing] = {request.drawing for request in requests}
        truncation = self.truncation if drawing is None else Truncation(top_p=drawing.top_p)
        scale = 1.0 if drawing is None else self.temperature / drawing.temperature
        batch = DecodingBatch.start(requests, truncation, self.end_tokens, self.tokenizer, self.device)
        logits, cache = self._prefill(requests)
        while True:
            going = batch.draw(logits * scale if scale != 1.0 else logits)
            ended = batch.live[~going].tolist()
            yield from (self._completion(requests[row], *batch.response(row)) for row in ended)
            if len(ended) == len(going):
                return
            if ended:
                batch.keep(cache.keep(going))
            logits = self.policy()(DecodeBatch(batch.last, cache))

    def _prefill(self, requests: Sequence[GenerationRequest]) -> tuple[Tensor, RaggedCache]:
        """Read every distinct prompt of a group once, then give each request its own row: ([B, V] logits, cache)."""
        keys = [(request.group_id, request.prompt_ids) for request in requests]
        place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        ids = [prompt_ids for _, prompt_ids in place]
        lengths = torch.tensor([len(i) for i in ids])
        ends = lengths.cumsum(0)
        capacity = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        cache = RaggedCache(lengths.to(self.device), capacity)
        batch = PrefillBatch(
            input_ids=torch.tensor([t for i in ids for t in i], device=self.device),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).to(self.device),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(self.device),
            last=(ends - 1).to(self.device),
            cache=cache,
        )
        logits = self.policy()(batch)
        rows = torch.tensor([place[key] for key in keys], device=self.device)
        cache.repeat(rows)
        return logits.index_select(0, rows), cache

    def _completion(
        self, request: GenerationRequest, token_ids: Tensor, logprobs: Tensor, finish_reason: str
    ) -> Completion:
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        return Completion(request.sample_id, token_ids, logprobs, finish_reason, self.version, text)


@dataclass(eq=False)
class DecodingBatch:
    """Responses being drawn side by side; ``B`` of them, of which ``b`` are still growing.

    Args:
        truncation: which tokens may be drawn.
        end_tokens: where a response ends.
        tokenizer: spells texts that end one.
        end_ids: [K] int64, token ids that end one.
        seeds, sample_ids, first_positions: [B] int64, keys of the random numbers.
        greedy: [B] bool.
        max_tokens: [B] int64, tokens of each response at most.
        live: [b] int64, rows of the responses still growing.
        last: [b] int64, the token that each of them ends with so far.
        tokens, logprobs: [B, largest of max_tokens] what was drawn so far.
        lengths: [B] int64, tokens of each response.
        stopped: [B] bool, whether it ended by itself.
    """

    truncation: Truncation
    end_tokens: EndTokens
    tokenizer: PreTrainedTokenizerBase
    end_ids: Tensor
    seeds: Tensor
    sample_ids: Tensor
    first_positions: Tensor
    greedy: Tensor
    max_tokens: Tensor
    live: Tensor
    last: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor

    @classmethod
    def start(
        cls,
        requests: Sequence[GenerationRequest],
        truncation: Truncation,
        end_tokens: EndTokens,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> DecodingBatch:
        """A batch before its first token."""
        count, limit = len(requests), max(r.max_tokens for r in requests)
        return cls(
            truncation=truncation,
            end_tokens=end_tokens,
            tokenizer=tokenizer,
            end_ids=torch.tensor(end_tokens.ids, device=device),
            seeds=torch.tensor([r.seed for r in requests], device=device),
            sample_ids=torch.tensor([r.sample_id for r in requests], device=device),
            first_positions=torch.tensor([r.first_position for r in requests], device=device),
            greedy=torch.tensor([r.greedy for r in requests], device=device),
            max_tokens=torch.tensor([r.max_tokens for r in requests], device=device),
            live=torch.arange(count, device=device),
            last=torch.empty(0, dtype=torch.int64, device=device),
            tokens=torch.zeros(count, limit, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, limit, device=device),
            lengths=torch.zeros(count, dtype=torch.int64, device=device),
            stopped=torch.zeros(count, dtype=torch.bool, device=device),
        )

    def draw(self, logits: Tensor) -> Tensor:
        """Draw one token for each live row from its [b, V] logits; returns [b] bool, which of them go on."""
        rows = self.live
        greedy, place = self.greedy[rows], self.lengths[rows]
        allowed = self.truncation(logits)
        uniform = uniform_of_token(self.seeds[rows], self.sample_ids[rows], self.first_positions[rows] + place)
        self.last = torch.where(greedy, logits.argmax(-1), draw(allowed, uniform))
        self.tokens[rows, place] = self.last
        self.logprobs[rows, place] = logprob_of(torch.where(greedy[:, None], logits, allowed), self.last)
        self.lengths[rows] += 1
        stopped = torch.isin(self.last, self.end_ids)
        if self.end_tokens.texts:
            stopped |= self._spelled()
        self.stopped[rows] = stopped
        return ~stopped & (self.lengths[rows] < self.max_tokens[rows])

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` [m] of the live ones only, in this order."""
        self.live, self.last = self.live[rows], self.last[rows]

    def response(self, row: int) -> tuple[Tensor, Tensor, str]:
        """([R] ids, [R] log-probabilities, finish reason) of one response, on the host."""
        length = int(self.lengths[row])
        finish_reason = STOP if bool(self.stopped[row]) else LENGTH
        return self.tokens[row, :length].cpu(), self.logprobs[row, :length].cpu(), finish_reason

    def _spelled(self) -> Tensor:
        """[b] bool, whether a live row has come to spell one of the texts that end it."""
        ids = [self.tokens[row, : self.lengths[row]].tolist() for row in self.live.tolist()]
        spelled = [self.end_tokens.spelled(of_row, self.tokenizer) for of_row in ids]
        return torch.tensor(spelled, device=self.live.device)
