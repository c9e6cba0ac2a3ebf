"""Episodes over a rollout engine: prompts and observations from the environment, responses from the policy.

Any number of turns, and episodes at different turns side by side. Token ids are kept as they were sampled and shown:
nothing is decoded and encoded again. Leaves out what an environment answers (``environments/``), how a response is
drawn (``rollout/``) and rewards by a function of the run (``sources.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlmodule.core.contract import Episode, RolloutEngine
from rlmodule.core.episodes import LENGTH, Completion, Done, Drawing, GenerationRequest, Message, Observation
from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.data.chat import ChatError, ChatFormat


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run.

    Args:
        row: what it is about.
        sample_id: of the sample it becomes; unique among the requests that run together.
        group_id, seed, greedy, drawing: as in GenerationRequest.
    """

    row: Prompt
    sample_id: int
    group_id: int
    seed: int = 0
    greedy: bool = False
    drawing: Drawing | None = None


@dataclass(frozen=True, eq=False)
class FinishedEpisode:
    """An episode as a sample: observation tokens have loss mask False and log-probability 0.

    Args:
        sample: the prompt, and everything after it as the response.
        reward: the environment's, or None where the run's reward function gives it.
    """

    sample: Sample
    reward: RewardResult | None


@dataclass(frozen=True, eq=False)
class EpisodeRunner:
    """Runs episodes of one environment.

    Args:
        start: row -> a new episode.
        chat: turns messages of the environment into tokens.
        max_prompt_length: tokens of a prompt at most.
        max_response_length: tokens of a sample after its prompt at most, observations included.
    """

    start: Callable[[Prompt], Episode]
    chat: ChatFormat
    max_prompt_length: int
    max_response_length: int

    def run(self, engine: RolloutEngine, requests: Sequence[EpisodeRequest]) -> list[FinishedEpisode]:
        """Run episodes to their ends, in one call of the engine; returns them in the order of ``requests``.

        Raises:
            DataError: a prompt or an observation cannot be put into tokens, or a prompt is too long.
        """
        finished = {episode.sample.sample_id: episode for episode in self.stream(engine, requests)}
        assert len(finished) == len(requests), f"{len(requests)} episodes were asked for, {len(finished)} have ended"
        return [finished[request.sample_id] for request in requests]

    def stream(self, engine: RolloutEngine, requests: Iterable[EpisodeRequest]) -> Iterator[FinishedEpisode]:
        """The same, each episode as soon as it ends.

        Raises:
            DataError: as ``run``.
        """
        batch = EpisodeBatch(self, requests, engine.version)
        with closing(engine.generate(batch.requests())) as completions:
            for completion in completions:
                finished = batch.receive(completion)
                if finished is not None:
                    yield finished
        batch.check_all_ended()


@dataclass(eq=False)
class EpisodeBatch:
    """Episodes that run together.

    Args:
        runner: begins them.
        to_run: what is asked for.
        version: of the weights that the engine has.
    """

    runner: EpisodeRunner
    to_run: Iterable[EpisodeRequest]
    version: int
    _running: dict[int, RunningEpisode] = field(default_factory=dict, init=False)  # by sample id
    _next_turns: deque[GenerationRequest] = field(default_factory=deque, init=False)

    def requests(self) -> Iterator[GenerationRequest | None]:
        """What an engine reads: next turns before new episodes, None while all episodes wait for a response."""
        for request in self.to_run:
            while self._next_turns:
                yield self._next_turns.popleft()
            assert request.sample_id not in self._running, f"two episodes have the sample id {request.sample_id}"
            self._running[request.sample_id] = RunningEpisode.begin(request, self.runner)
            yield self._running[request.sample_id].next_turn(self.version)
        while self._running:
            yield self._next_turns.popleft() if self._next_turns else None

    def receive(self, completion: Completion) -> FinishedEpisode | None:
        """Hand a response to its episode, which ends, and is returned, or has another turn."""
        episode = self._running[completion.sample_id]
        finished = episode.receive(completion)
        if finished is None:
            self._next_turns.append(episode.next_turn(self.version))
        else:
            del self._running[completion.sample_id]
        return finished

    def check_all_ended(self) -> None:
        """The engine has answered every request."""
        assert not self._running, f"the engine left {len(self._running)} requests without a response"


@dataclass(eq=False)
class RunningEpisode:
    """One episode under way.

    Args:
        request: what was asked for.
        runner: has limits and chat format.
        episode: the environment's side.
        prompt: the row, with the prompt that the episode opened with.
        ids, logprobs, masks: token ids [R] int64, log-probabilities [R] float32 and loss mask [R] bool of each response
            and each observation so far.
        versions: of the weights that drew each response.
    """

    request: EpisodeRequest
    runner: EpisodeRunner
    episode: Episode
    prompt: Prompt
    ids: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, request: EpisodeRequest, runner: EpisodeRunner) -> RunningEpisode:
        """Start an episode and read its prompt.

        Raises:
            DataError: the prompt cannot be put into tokens, or is too long.
        """
        begun = cls(request, runner, runner.start(request.row), request.row)
        ids = begun._ids_of(begun.episode.prompt, lambda messages: runner.chat.encode_prompts([messages])[0])
        if len(ids) > runner.max_prompt_length:
            because = f"its prompt has {len(ids)} tokens, data.max_prompt_length is {runner.max_prompt_length}"
            raise begun._error(because, f"Use data.max_prompt_length={len(ids)}")
        begun.prompt = replace(request.row, ids=ids)
        return begun

    @property
    def length(self) -> int:
        """Tokens after the prompt so far."""
        return sum(map(len, self.ids))

    def next_turn(self, version: int) -> GenerationRequest:
        """What the engine is asked for now; ``version`` of its weights."""
        request = self.request
        return GenerationRequest(
            prompt_ids=(*self.prompt.ids, *(token for ids in self.ids for token in ids.tolist())),
            sample_id=request.sample_id,
            group_id=request.group_id,
            max_tokens=self.runner.max_response_length - self.length,
            seed=request.seed,
            first_position=self.length,
            greedy=request.greedy,
            version=version,
            drawing=request.drawing,
        )

    def receive(self, completion: Completion) -> FinishedEpisode | None:
        """Take a response; the finished episode if it was the last one.

        Raises:
            DataError: the environment's observation cannot be put into tokens.
        """
        self._append(completion.token_ids, completion.logprobs, is_sampled=True)
        self.versions.append(completion.version)
        reply = self.episode.reply(completion)
        if isinstance(reply, Done):
            return self._finish(completion, completion.finish_reason, reply)
        if completion.finish_reason == LENGTH:
            return self._finish(completion, LENGTH, self.episode.cut())
        chat, last = self.runner.chat, int(completion.token_ids[-1])
        ids = self._ids_of(reply, lambda messages: chat.encode_observation(messages, after=last))
        if self.length + len(ids) >= self.runner.max_response_length:  # no room for another response
            return self._finish(completion, LENGTH, self.episode.cut())
        self._append(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids)), is_sampled=False)
        return None

    def _append(self, ids: Tensor, logprobs: Tensor, *, is_sampled: bool) -> None:
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        self.masks.append(torch.full(ids.shape, is_sampled))

    def _finish(self, last: Completion, finish_reason: str, end: Done) -> FinishedEpisode:
        ids, decode = torch.cat(self.ids), self.runner.chat.tokenizer.decode
        sample = Sample(
            sample_id=self.request.sample_id,
            group_id=self.request.group_id,
            prompt=self.prompt,
            response_ids=ids,
            loss_mask=torch.cat(self.masks),
            rollout_logprob=torch.cat(self.logprobs),
            finish_reason=finish_reason,
            text=last.text if len(self.ids) == 1 else str(decode(ids, skip_special_tokens=True)),
            version=min(self.versions),
        )
        return FinishedEpisode(sample, end.reward)

    def _ids_of(self, shown: Observation, encode: Callable[[Sequence[Message]], tuple[int, ...]]) -> tuple[int, ...]:
        """The observation's own token ids, or those that ``encode`` makes of its messages."""
        if shown.ids is not None:
            return shown.ids
        assert shown.messages is not None, "an observation is messages or ids"
        try:
            return encode(shown.messages)
        except ChatError as error:
            raise self._error(str(error), "Change what the environment says, or use another model") from error

    def _error(self, because: str, fix: str) -> DataError:
        row = self.request.row
        location = f"episode of row {row.row + 1} of {row.source or 'the data'}"
        return DataError(location=location, because=because, fix=fix)
