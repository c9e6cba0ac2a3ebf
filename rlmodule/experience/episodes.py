"""Episodes over a rollout engine: prompts and observations from the environment, responses from the policy.

Any number of turns, and episodes at different turns side by side. Token ids are kept as they were sampled and shown:
nothing is decoded and encoded again. An episode in which the environment fails is unscored: it leaves the statistics
and the loss, and costs no other. Leaves out what an environment answers (``environments/``), how a response is drawn
(``rollout/``) and rewards by a function of the run (``sources.py``).
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rlmodule.core.config import at_least, more_than
from rlmodule.core.contract import Episode, Responder
from rlmodule.core.episodes import LENGTH, STOP, Completion, Done, Drawing, GenerationRequest, Message, Observation
from rlmodule.core.errors import DataError, RLModuleError
from rlmodule.core.types import Prompt, RewardResult, Sample
from rlmodule.data.chat import ChatError, ChatFormat
from rlmodule.experience.checked_replies import WrongReplyError, checked_end, checked_observation
from rlmodule.experience.replies import Failure, Replies


@dataclass(frozen=True)
class EpisodesConfig:
    """How episodes run; the keys stand in the ``environment`` section beside the environment's own."""

    max_turns: int = 16  # responses of an episode at most; rollout.max_response_length limits the tokens of all of them
    max_turn_length: int | None = None  # tokens of one response at most; null: what the episode has left
    reply_seconds: float = 60.0  # that the environment may take for one reply, else its episode has failed
    num_workers: int = 0  # episodes that the environment works on at a time, on each rank; 0: one, without a time limit

    def __post_init__(self) -> None:
        at_least("max_turns", self.max_turns, 1)
        if self.max_turn_length is not None:
            at_least("max_turn_length", self.max_turn_length, 1)
        more_than("reply_seconds", self.reply_seconds, 0)
        at_least("num_workers", self.num_workers, 0)

    @property
    def has_turns(self) -> bool:
        """Whether an episode can have several responses."""
        return self.max_turns > 1


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
        turn_rewards: of the responses that were answered, where the environment gave any.
        answer: the last response as text, which is what a reward function scores.
        num_turns: responses in it.
        has_turns: whether episodes of its environment can have several.
        diagnostics: what the environment has to log beside the reward.
    """

    sample: Sample
    reward: RewardResult | None
    turn_rewards: tuple[float, ...] = ()
    answer: str = ""
    num_turns: int = 1
    has_turns: bool = False
    diagnostics: Mapping[str, float] = field(default_factory=dict)

    @property
    def to_score(self) -> Sample:
        """What a reward function is given: the sample with its last response as text."""
        return replace(self.sample, text=self.answer) if self.has_turns else self.sample

    def scored(self, last: RewardResult) -> RewardResult:
        """The reward of the episode: those of its turns and the last one added up, each logged as ``turn_<number>``."""
        if not self.has_turns and not self.diagnostics:
            return last
        numbers, value = {**self.diagnostics, "turns": float(self.num_turns)}, last.value
        if self.turn_rewards and value is not None:
            given = [*self.turn_rewards, *[0.0] * (self.num_turns - len(self.turn_rewards))]
            given[-1] += value
            numbers |= {f"turn_{number}": of_turn for number, of_turn in enumerate(given, start=1)}
            value = sum(given)
        return replace(last, value=value, diagnostics={**last.diagnostics, **numbers})


@dataclass(frozen=True, eq=False)
class EpisodeRunner:
    """Runs episodes of one environment.

    Args:
        start: row -> a new episode.
        chat: turns messages of the environment into tokens.
        max_prompt_length: tokens of a prompt at most.
        max_response_length: tokens of a sample after its prompt at most, observations included.
        config: further limits.
        gives_rewards: whether every episode brings its own reward along.
    """

    start: Callable[[Prompt], Episode]
    chat: ChatFormat
    max_prompt_length: int
    max_response_length: int
    config: EpisodesConfig = field(default_factory=EpisodesConfig)
    gives_rewards: bool = False

    def run(
        self,
        engine: Responder,
        requests: Sequence[EpisodeRequest],
        ended: Callable[[FinishedEpisode], object] = lambda episode: None,
    ) -> list[FinishedEpisode]:
        """Run episodes to their ends, in one call of the engine; returns them in the order of ``requests``.

        Args:
            engine: responds.
            requests: the episodes.
            ended: is called with each episode as soon as it ends.

        Raises:
            DataError: a prompt or an observation cannot be put into tokens, or a prompt is too long.
        """
        finished = dict[int, FinishedEpisode]()
        for episode in self.stream(engine, requests):
            finished[episode.sample.sample_id] = episode
            ended(episode)
        assert len(finished) == len(requests), f"{len(requests)} episodes were asked for, {len(finished)} have ended"
        return [finished[request.sample_id] for request in requests]

    def stream(self, engine: Responder, requests: Iterable[EpisodeRequest]) -> Iterator[FinishedEpisode]:
        """The same, each episode as soon as it ends.

        Raises:
            DataError: as ``run``.
        """
        with closing(EpisodeBatch(self, iter(requests), engine.version)) as batch:
            with closing(engine.generate(batch.requests())) as completions:
                for completion in completions:
                    batch.receive(completion)
                    yield from batch.ended()
            yield from batch.ended()
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
    to_run: Iterator[EpisodeRequest]
    version: int
    _running: dict[int, RunningEpisode] = field(default_factory=dict, init=False)  # by sample id
    _next_turns: deque[GenerationRequest] = field(default_factory=deque, init=False)
    _finished: deque[FinishedEpisode] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        config = self.runner.config
        self._replies: Replies[RunningEpisode] = Replies(config.num_workers, config.reply_seconds)

    def requests(self) -> Iterator[GenerationRequest | None]:
        """What an engine reads: next turns before new episodes, None while all episodes wait for a response.

        Replies are waited for in the order in which they were asked for, so which requests come together does not
        depend on how long any of them takes.
        """
        are_all_begun = False
        while True:
            while not are_all_begun and len(self._replies) + len(self._next_turns) <= self.runner.config.num_workers:
                if (request := next(self.to_run, None)) is None:
                    are_all_begun = True
                else:
                    self._begin(request)
            while self._replies and not self._next_turns:
                self._take()
            if self._next_turns:
                yield self._next_turns.popleft()
            elif self._running:
                yield None
            elif are_all_begun:  # else those that were begun have failed before their first response
                return

    def receive(self, completion: Completion) -> None:
        """Hand a response to its episode, which ends or has another turn once the environment has replied."""
        episode = self._running[completion.sample_id]
        self._replies.ask(episode, episode.answered(completion))
        if not self._replies.num_workers:
            self._take()

    def ended(self) -> Iterator[FinishedEpisode]:
        """Episodes that have ended since the last call."""
        while self._finished:
            yield self._finished.popleft()

    def check_all_ended(self) -> None:
        """The engine has answered every request."""
        assert not self._running, f"the engine left {len(self._running)} requests without a response"

    def close(self) -> None:
        """Wait for no reply any more, and let episodes go that will not end."""
        self._replies.close()
        for episode in self._running.values():
            episode.let_go()

    def _begin(self, request: EpisodeRequest) -> None:
        assert request.sample_id not in self._running, f"two episodes have the sample id {request.sample_id}"
        episode = self._running[request.sample_id] = RunningEpisode(request, self.runner, self.version, request.row)
        self._replies.ask(episode, episode.begun)
        if not self._replies.num_workers:
            self._take()

    def _take(self) -> None:
        """See what follows the oldest reply: a turn, or the end of its episode."""
        episode, reply = self._replies.take()
        finished = episode.take(reply)
        if finished is None:
            self._next_turns.append(episode.next_turn())
        else:
            del self._running[episode.request.sample_id]
            self._finished.append(finished)


@dataclass(eq=False)
class RunningEpisode:
    """One episode under way.

    Args:
        request: what was asked for.
        runner: has limits and chat format.
        version: of the engine's weights.
        prompt: the row, with the prompt that the episode opened with.
        ids, logprobs, masks, versions: token ids [R] int64, log-probabilities [R] float32, loss mask [R] bool and
            versions [R] int64 of the weights, of each response and each observation so far.
        completions: the responses so far.
        turn_rewards: of those that were answered; None where the environment gave none.
    """

    request: EpisodeRequest
    runner: EpisodeRunner
    version: int
    prompt: Prompt
    ids: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    _episode: Episode | None = field(default=None, init=False)

    # ---- what is asked of the environment, perhaps in another thread: nothing but the environment is touched

    def begun(self) -> Observation:
        """Start the episode; its prompt."""
        self._episode = self.runner.start(self.request.row)
        return self._episode.prompt

    def answered(self, completion: Completion) -> Callable[[], Observation | Done]:
        """Take a response; the call that asks the environment what follows."""
        self._append(completion.token_ids, completion.logprobs, versions=_versions_of(completion))
        self.completions.append(completion)
        assert self._episode is not None, "an episode begins before its first response"
        return partial(self._episode.reply, self._with_raw_text(completion))

    # ---- what follows

    @property
    def length(self) -> int:
        """Tokens after the prompt so far."""
        return sum(map(len, self.ids))

    def take(self, reply: object) -> FinishedEpisode | None:
        """Go on with what the environment gave; the finished episode where that was the end.

        Raises:
            DataError: what it shows cannot be put into tokens, or the prompt is too long.
        """
        if isinstance(reply, Failure):
            return self._failed(reply)
        try:
            if isinstance(reply, Done) and self.completions:
                return self._ended(self.completions[-1].finish_reason, self._checked_end(reply))
            if not isinstance(reply, Observation):
                raise WrongReplyError("an Observation or Done was due")
            reply = checked_observation(reply, len(self.runner.chat.tokenizer))
            if self.completions:
                return self._show(reply)
            self._open(reply)
        except WrongReplyError as error:
            return self._failed(Failure(f"the environment gave {reply!r:.200}; {error}"))
        return None

    def next_turn(self) -> GenerationRequest:
        """What the engine is asked for now."""
        request, left = self.request, self.runner.max_response_length - self.length
        return GenerationRequest(
            prompt_ids=(*self.prompt.ids, *(token for ids in self.ids for token in ids.tolist())),
            sample_id=request.sample_id,
            group_id=request.group_id,
            max_tokens=min(left, self.runner.config.max_turn_length or left),
            seed=request.seed,
            first_position=self.length,
            greedy=request.greedy,
            version=self.version,
            drawing=request.drawing,
        )

    def _open(self, shown: Observation) -> None:
        """Begin with this prompt."""
        runner = self.runner
        ids = self._ids_of(shown, lambda messages: runner.chat.encode_prompts([messages])[0])
        if len(ids) > runner.max_prompt_length:
            because = f"its prompt has {len(ids)} tokens, data.max_prompt_length is {runner.max_prompt_length}"
            raise self._error(because, f"Use data.max_prompt_length={len(ids)}")
        self.prompt = replace(self.request.row, ids=ids)

    def _show(self, reply: Observation) -> FinishedEpisode | None:
        """Append what follows a response, unless there is no room for another one."""
        self.turn_rewards.append(reply.reward)
        last = self.completions[-1]
        if last.finish_reason == LENGTH or len(self.completions) == self.runner.config.max_turns:
            return self._cut()
        chat, token = self.runner.chat, int(last.token_ids[-1])
        ids = self._ids_of(reply, lambda messages: chat.encode_observation(messages, after=token))
        if self.length + len(ids) >= self.runner.max_response_length:  # no room for another response
            return self._cut()
        self._append(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids)))
        return None

    def _cut(self) -> FinishedEpisode:
        """The end where a limit is reached."""
        assert self._episode is not None, "only an episode that runs can be cut"
        try:
            end = self._checked_end(self._episode.cut())
        except RLModuleError:
            raise
        except WrongReplyError as error:
            return self._failed(Failure(f"cut() of the environment: {error}"))
        except Exception as error:
            return self._failed(Failure("".join(traceback.format_exception(error))))
        return self._ended(LENGTH, end)

    def _checked_end(self, end: object) -> Done:
        """An end with a reward, where the environment says that it gives them.

        Raises:
            WrongReplyError: it is none.
        """
        checked = checked_end(end)
        if checked.reward is None and self.runner.gives_rewards:
            raise WrongReplyError("there is no reward in it, though the environment says gives_rewards = True")
        return checked

    def _append(self, ids: Tensor, logprobs: Tensor, *, versions: Tensor | None = None) -> None:
        """Add a response with the versions that drew it, or what the environment says."""
        self.ids.append(ids)
        self.logprobs.append(logprobs)
        self.masks.append(torch.full(ids.shape, versions is not None))
        before = int(self.versions[-1][-1]) if self.versions else self.version
        self.versions.append(torch.full(ids.shape, before) if versions is None else versions)

    def let_go(self) -> None:
        """Nothing follows: what the environment holds for this episode may go."""
        if self._episode is not None:
            with suppress(Exception):
                self._episode.cut()

    def _failed(self, failure: Failure) -> FinishedEpisode:
        """The end of an episode in which the environment failed: a sample that nothing is learned from."""
        if not failure.timed_out:
            self.let_go()
        if not self.ids:  # a sample has a token
            end = self.runner.chat.end_tokens()[0]
            self._append(torch.tensor([end]), torch.zeros(1))
        self.turn_rewards.clear()
        counts = {"failed": 1.0, "timed_out": float(failure.timed_out)}
        text = f"{self._location}, turn {len(self.completions)}:\n{failure.text}"
        return self._ended(STOP, Done(RewardResult(None, counts=counts, failure=text)))

    def _ended(self, finish_reason: str, end: Done) -> FinishedEpisode:
        ids, decode = torch.cat(self.ids), self.runner.chat.tokenizer.decode
        answer = self.completions[-1].text if self.completions else ""
        versions = torch.cat(self.versions)
        sample = Sample(
            sample_id=self.request.sample_id,
            group_id=self.request.group_id,
            prompt=self.prompt,
            response_ids=ids,
            loss_mask=torch.cat(self.masks),
            rollout_logprob=torch.cat(self.logprobs),
            finish_reason=finish_reason,
            text=answer if len(self.ids) == 1 else str(decode(ids, skip_special_tokens=True)),
            version=int(versions.min()),
            token_versions=None if bool((versions == versions[0]).all()) else versions,
        )
        given = [value or 0.0 for value in self.turn_rewards]
        return FinishedEpisode(
            sample,
            end.reward,
            tuple(given) if any(value is not None for value in self.turn_rewards) else (),
            answer,
            len(self.completions),
            self.runner.config.has_turns,
            end.diagnostics,
        )

    def _with_raw_text(self, completion: Completion) -> Completion:
        if not self.runner.config.has_turns:
            return completion
        return replace(completion, raw_text=str(self.runner.chat.tokenizer.decode(completion.token_ids)))

    def _ids_of(self, shown: Observation, encode: Callable[[Sequence[Message]], tuple[int, ...]]) -> tuple[int, ...]:
        """The observation's own token ids, or those that ``encode`` makes of its messages.

        Raises:
            DataError: the template refuses such messages, whatever they say.
            WrongReplyError: it refuses what these say.
        """
        if shown.ids is not None:
            return shown.ids
        assert shown.messages is not None, "an observation is messages or ids"
        try:
            return encode(shown.messages)
        except ChatError as error:
            try:
                encode([{**message, "content": "x"} for message in shown.messages])
            except ChatError:
                raise self._error(str(error), "Change what the environment says, or use another model") from error
            raise WrongReplyError(str(error)) from error

    @property
    def _location(self) -> str:
        row = self.request.row
        return f"episode of row {row.row + 1} of {row.source or 'the data'}"

    def _error(self, because: str, fix: str) -> DataError:
        return DataError(location=self._location, because=because, fix=fix)


def _versions_of(completion: Completion) -> Tensor:
    """[R] int64, the version that drew each token."""
    return (
        torch.full_like(completion.token_ids, completion.version)
        if completion.versions is None
        else completion.versions
    )
