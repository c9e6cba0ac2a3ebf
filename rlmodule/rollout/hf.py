"""In-process sampling with the policy's own weights: packed prefill of each distinct prompt, then ragged decoding.

No padding token is computed, new requests take the places of responses that have ended, and nothing is copied between a
trainer and a server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from rlmodule.core.config import at_least, more_than
from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.errors import ConfigError
from rlmodule.core.memory import free_memory
from rlmodule.core.types import POLICY
from rlmodule.models.alone import RowMode
from rlmodule.models.attention import RaggedCache
from rlmodule.models.policy import DecodeBatch, PrefillBatch
from rlmodule.models.shape import deals_out_keys, shape_of
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.cache_room import GB, CacheRoom
from rlmodule.rollout.parts.decoding import DecodingBatch, DecodingRows
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.lock_step import LockStep
from rlmodule.rollout.parts.lookup import Lookup
from rlmodule.rollout.parts.sampling import Truncation

if TYPE_CHECKING:  # types alone
    from rlmodule.data.end_tokens import EndTokens

AUTO = "auto"
LOGITS = 8  # bytes for each token of the vocabulary and row while one is drawn
REFILL_AT = 8  # new requests come in once an eighth of the places is free
RETURN_AT = 8  # responses are handed back once an eighth of those at work has ended


@ROLLOUTS.register
@dataclass(frozen=True)
class HFRolloutConfig:
    """Settings of the in-process engine."""

    max_batch_size: int = 1024  # responses decoded side by side
    cache_gb: Any = None  # gigabytes of keys and values at most, on each process; null: of all those responses; auto

    lookup: int = 0  # tokens guessed ahead of each response at most, from what it repeats of itself and its prompt
    keep_copy: bool = False  # the copy that a sharded strategy samples with stays until its weights may change

    in_process: ClassVar[bool] = True
    pauses: ClassVar[tuple[str, ...]] = ()  # it samples with the weights that are being trained

    def __post_init__(self) -> None:
        at_least("max_batch_size", self.max_batch_size, 1)
        at_least("lookup", self.lookup, 0)
        if self.cache_gb in (None, AUTO):
            return
        if isinstance(self.cache_gb, bool) or not isinstance(self.cache_gb, int | float):
            raise ConfigError(
                key="cache_gb", got=self.cache_gb, because="it is no number", fix=f"Use a number, null or {AUTO}"
            )
        more_than("cache_gb", self.cache_gb, 0)

    def places(self, row_bytes: int) -> int:
        """Responses decoded side by side at most, each with so many bytes of keys and values; 0 where none fits.

        With ``auto`` it is the one that there must be room for, as how many more there are is known while sampling.
        """
        if self.cache_gb is None:
            return self.max_batch_size
        return 1 if self.cache_gb == AUTO else min(self.max_batch_size, int(self.cache_gb * GB // max(row_bytes, 1)))

    def check_here(self) -> None:
        """Nothing is started."""

    def connect(self, context: EngineContext) -> HFEngine:
        """The engine for the policy of a run.

        Raises:
            ConfigError: tokens are to be guessed, and what the model keeps of a row cannot be taken back.
        """
        if self.lookup and (context.policy.rows is not RowMode.PACKED or context.policy.state_classes):
            raise ConfigError(
                key="rollout.lookup",
                got=self.lookup,
                because="a wrong guess cannot be taken back from what this model keeps of a response while it is drawn",
                fix="Use rollout.lookup=0",
            )
        ranks = context.strategy.sampling_ranks
        return HFEngine(
            partial(context.strategy.generator, POLICY),
            partial(context.strategy.generation_mode, POLICY, keep=self.keep_copy),
            context.tokenizer,
            context.device,
            context.end_tokens,
            context.sampling.truncation,
            self.max_batch_size,
            temperature=context.sampling.temperature,
            compute_dtype=context.policy.compute_dtype,
            places=None if self.cache_gb is None else self._room(context),
            lookup=self.lookup,
            lock_step=None if ranks is None else LockStep(ranks),
        )

    def _room(self, context: EngineContext) -> CacheRoom:
        policy, strategy = context.policy, context.strategy
        config = policy.lm.config

        def free() -> float:
            """What the process with least has: ranks that repeat each other's tokens draw as many side by side."""
            return min(strategy.gather_from_all(free_memory(context.device, strategy.layout.world_size)))

        itemsize = (policy.compute_dtype or policy.lm.dtype).itemsize
        shares_keys = strategy.sampling_ranks is not None and deals_out_keys(config)
        ranks = strategy.layout.tp_size if shares_keys else 1
        vocabulary = int(config.get_text_config().vocab_size)
        return CacheRoom(
            row_bytes=lambda length: shape_of(config).cache_bytes(length, itemsize) // ranks,
            beside=LOGITS * vocabulary,
            most=self.max_batch_size,
            given=None if self.cache_gb == AUTO else self.cache_gb * GB,
            free=free,
        )


@dataclass(eq=False)
class HFEngine:
    """Samples with the module that is being trained; requests join those under way as places become free.

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
        compute_dtype: of the policy's products under autocast; None for the type of its weights.
        places: how many rows of so many tokens have room, prompt and response; None where max_batch_size alone counts.
        lookup: tokens that are guessed ahead of each row at most, from what it has said before.
        lock_step: ranks that share the policy's matrices, and so call it equally often; None where this one is free.
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
    compute_dtype: torch.dtype | None = None
    places: CacheRoom | None = None
    lookup: int = 0
    lock_step: LockStep | None = None

    def start(self) -> None:
        """The module is there already."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """The module has the weights already; only their version is new."""
        self.version = version

    def close(self) -> None:
        """The module stays."""

    @torch.no_grad()
    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, soon after it ends; new requests take the places of responses that have ended."""
        waiting = Waiting(iter(requests))
        with self.generation_mode():
            if self.places is not None:
                self.places.measure()
            running: Running | None = None
            while True:
                running = self._refill(running, waiting)
                if running is None:
                    return
                ended = self._go_on(running)
                yield from (self._completion(running.batch, row) for row in ended)
                if not len(running.batch.live):
                    running = None

    @torch.no_grad()
    def stream(self, request: GenerationRequest) -> Generator[int, None, None]:
        """The tokens of one response, each as soon as it is drawn."""
        with self.generation_mode():
            running = self._prefill([request])
            while True:
                goes_on = bool(running.batch.draw(running.logits))
                yield int(running.batch.last)
                if not goes_on:
                    return
                running.logits = self.policy()(DecodeBatch(running.batch.last, running.cache))

    def _refill(self, running: Running | None, waiting: Waiting) -> Running | None:
        """Let as many requests in as there is room for; None where there is nothing to do.

        Reading prompts copies the cache, so it waits until a share of the places is free.
        """
        count, length = (len(running.batch.live), running.cache.capacity) if running else (0, 0)
        places = self._places(length)
        if running is not None and (not running.can_grow or places - count < max(1, places // REFILL_AT)):
            return running
        fresh: list[GenerationRequest] = []
        while count + len(fresh) < self._places(length) and (request := waiting.next()) is not None:
            needed = max(length, len(request.prompt_ids) + request.max_tokens + self.lookup)
            if count + len(fresh) >= self._places(needed):
                waiting.put_back(request)
                break
            fresh, length = [*fresh, request], needed
        if self.lock_step is not None:
            self.lock_step.check(fresh)
        assert all(request.version <= self.version for request in fresh), "a request wants newer weights than these"
        if not fresh:
            return running
        started = self._prefill(fresh)
        return started if running is None else running.join(started)

    def _places(self, length: int) -> int:
        """Rows of ``length`` tokens that may be drawn side by side."""
        return self.max_batch_size if self.places is None or not length else self.places(length)

    def _go_on(self, running: Running) -> list[int]:
        """Draw tokens until a share of the responses has ended; returns the rows of those.

        Under mixed precision weights that train are cast to the type of products once in here, not for every token.
        """
        enough = max(1, len(running.batch.live) // RETURN_AT)
        ended: list[int] = []
        policy, dtype = self.policy(), self.compute_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            while len(ended) < enough:
                going = running.draw()
                over = running.batch.live[~going].tolist()
                ended += over
                if len(over) == len(going):
                    running.batch.keep(going.nonzero().squeeze(1))
                    break
                if over:
                    running.batch.keep(running.cache.keep(going))
                running.logits = policy(DecodeBatch(running.next_ids(), running.cache))
        return ended

    def _prefill(self, requests: Sequence[GenerationRequest]) -> Running:
        """Read every distinct prompt of a group once, then give each request its own row."""
        keys = [(request.group_id, request.prompt_ids) for request in requests]
        place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        ids = [prompt_ids for _, prompt_ids in place]
        lengths = torch.tensor([len(i) for i in ids])
        ends = lengths.cumsum(0)
        capacity = max(len(request.prompt_ids) + request.max_tokens for request in requests) + self.lookup
        cache = RaggedCache(lengths.to(self.device), capacity)
        prompts = PrefillBatch(
            input_ids=torch.tensor([t for i in ids for t in i], device=self.device),
            position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]).to(self.device),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(self.device),
            last=(ends - 1).to(self.device),
            cache=cache,
        )
        logits = self.policy()(prompts)
        rows = torch.tensor([place[key] for key in keys], device=self.device)
        cache.repeat(rows)
        lookup = Lookup.of(requests, self.lookup) if self.lookup else None
        return Running(self._batch(requests), cache, logits.index_select(0, rows), lookup)

    def _batch(self, requests: Sequence[GenerationRequest]) -> DecodingBatch:
        [drawing] = {request.drawing for request in requests}
        truncation = self.truncation if drawing is None else Truncation(top_p=drawing.top_p)
        scale = 1.0 if drawing is None else self.temperature / drawing.temperature
        rows = DecodingRows.start(requests, self.device)
        live = torch.arange(len(requests), device=self.device)
        return DecodingBatch(truncation, scale, self.end_tokens, self.tokenizer, rows, live, self.lock_step)

    def _completion(self, batch: DecodingBatch, row: int) -> Completion:
        sample_id, token_ids, logprobs, finish_reason = batch.rows.response(row)
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        return Completion(sample_id, token_ids, logprobs, finish_reason, self.version, text)


@dataclass(eq=False)
class Waiting:
    """Requests that are to come; None among them says that there is none yet."""

    requests: Iterator[GenerationRequest | None]
    held: GenerationRequest | None = None

    def next(self) -> GenerationRequest | None:
        """The next one, None where there is none, or none yet."""
        held, self.held = self.held, None
        return next(self.requests, None) if held is None else held

    def put_back(self, request: GenerationRequest) -> None:
        """It comes next again."""
        self.held = request


@dataclass(eq=False)
class Running:
    """Responses being drawn, between two passes of the model.

    Args:
        batch: what was drawn.
        cache: what the model keeps of it; rows in the order of ``batch.live``.
        logits: [b, V] of the next token of each; [b, 1 + Q, V] where Q tokens of each were guessed.
        lookup: guesses them; None where none are.
        guesses: [b, Q] of each row, -1 where there is none.
    """

    batch: DecodingBatch
    cache: RaggedCache
    logits: Tensor
    lookup: Lookup | None = None
    guesses: Tensor | None = None

    def draw(self) -> Tensor:
        """Draw a token for each row, and further ones as long as what is drawn is what was guessed.

        Every token is drawn with the number of its own position, so it is the same with and without guesses.

        Returns:
            [b] bool, which rows go on.
        """
        guesses, self.guesses = self.guesses, None
        if guesses is None:
            return self.batch.draw(self.logits)
        going = self.batch.draw(self.logits[:, 0])
        counts = torch.zeros_like(self.batch.last)
        right = torch.arange(len(going), device=going.device)
        for place, guess in enumerate(guesses.unbind(1), start=1):
            right = right[going[right] & (self.batch.last[right] == guess[right])]
            if not len(right):
                break
            going[right] = self.batch.draw(self.logits[right, place], right)
            counts[right] += 1
        self.cache.advance_by(counts)
        return going

    def next_ids(self) -> Tensor:
        """[b] the last token of each row; [b, 1 + Q] with guesses behind it, where a row has any."""
        last = self.batch.last
        if self.lookup is None:
            return last
        found = self.lookup.guesses(self.batch)
        width = max(map(len, found), default=0)
        if not width:
            return last
        self.guesses = torch.tensor([[*row, *[-1] * (width - len(row))] for row in found], device=last.device)
        return torch.cat([last[:, None], self.guesses.clamp(min=0)], 1)

    @property
    def can_grow(self) -> bool:
        """Whether others can join; rows that a model of its own ways keeps cannot be put beside others."""
        return self.cache.instead is None

    def join(self, other: Running) -> Running:
        """Both side by side."""
        rows = self.cache.join(other.cache)
        self.batch.join(other.batch, rows)
        if self.lookup is not None and other.lookup is not None:
            self.lookup.join(other.lookup)
        logits = other.logits
        if self.guesses is not None:  # the others have none
            width = self.guesses.shape[1]
            logits = functional.pad(logits[:, None], (0, 0, 0, width))
            none = self.guesses.new_full((len(logits), width), -1)
            self.guesses = torch.cat([self.guesses, none]).index_select(0, rows)
        self.logits = torch.cat([self.logits, logits]).index_select(0, rows)
        return self
