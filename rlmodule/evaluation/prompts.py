"""Answers to held-out prompts, one or several to each, with their rewards; every rank answers its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from rlmodule.core.contract import Reward, RolloutEngine, Strategy
from rlmodule.core.evaluations import EvaluatedAnswer, Evaluation
from rlmodule.core.types import Prompt, Sample, ScoredSample
from rlmodule.evaluation import VALIDATION
from rlmodule.evaluation.answers import answer_metrics
from rlmodule.evaluation.config import ValConfig
from rlmodule.experience.early_rewards import EarlyRewards
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner
from rlmodule.experience.failures import check_not_all_failed
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.sources import share_of_rank, with_rewards


@dataclass(frozen=True, eq=False)
class PromptEvaluator:
    """Episodes about held-out rows, with their rewards.

    Args:
        prompts: name of each validation set -> its rows, the same on every rank.
        episodes: runs them.
        engine: gives the rollout engine, with the current weights, once the strategy is set up.
        reward: reward function of episodes that end without a reward of their own.
        strategy: where ranks are.
        config: how many answers, and how they are drawn.
        answer_of: reads the answer in a response; None where the reward function says none.
    """

    best_metric: ClassVar[str] = f"{VALIDATION}/reward/mean"
    best_mode: ClassVar[str] = "max"

    prompts: Mapping[str, Sequence[Prompt]]
    episodes: EpisodeRunner
    engine: Callable[[], RolloutEngine]
    reward: Reward
    strategy: Strategy
    config: ValConfig = field(default_factory=ValConfig)
    answer_of: Callable[[Sample], str | None] | None = None

    def __call__(self) -> Evaluation:
        """The answers of all ranks and the numbers made of them."""
        mine: list[EvaluatedAnswer] = []

        def collect() -> list[ScoredSample]:
            scored = self._answered()
            mine.extend(self._described(s) for s in scored)
            return scored

        collectives = self.strategy.collectives
        _, sample_info = gather_sample_info(collect, collectives)
        check_not_all_failed(sample_info, "the validation")
        everyone = [answer for part in collectives.gather_objects(mine) for answer in part]
        answers = sorted(everyone, key=lambda answer: answer.sample_id)
        return Evaluation(answer_metrics(answers, self.config.n, self.config.seed), answers)

    @cached_property
    def _rows(self) -> list[tuple[str, Prompt]]:
        """(validation set, row) by prompt id."""
        return [(name, prompt) for name, prompts in self.prompts.items() for prompt in prompts[:]]

    def _answered(self) -> list[ScoredSample]:
        """This rank's share of the answers."""
        config = self.config
        requests = [
            EpisodeRequest(
                prompt,
                sample_id=prompt_id * config.n + number,
                group_id=prompt_id,
                seed=config.seed,
                greedy=config.is_greedy,
                drawing=config.drawing,
            )
            for prompt_id, (_, prompt) in share_of_rank(list(enumerate(self._rows)), self.strategy.layout)
            for number in range(config.n)
        ]
        # Also without a share of its own: every rank takes part when a sharded model is made whole.
        with EarlyRewards(self.reward) as early:
            return with_rewards(self.episodes.run(self.engine(), requests, early.begin), early)

    def _described(self, scored: ScoredSample) -> EvaluatedAnswer:
        sample, score = scored.sample, scored.score
        answered = sample if scored.answer is None else replace(sample, text=scored.answer)
        name, prompt = self._rows[sample.group_id]
        decode = self.episodes.chat.tokenizer.decode
        return EvaluatedAnswer(
            sample_id=sample.sample_id,
            prompt_id=sample.group_id,
            dataset=name,
            source=prompt.source,
            prompt=prompt.text or str(decode(list(sample.prompt.ids))),
            response=sample.text or str(decode(sample.response_ids, skip_special_tokens=True)),
            answer=prompt.answer,
            extracted=None if self.answer_of is None else self.answer_of(answered),
            reward=score.value,
            parts=dict(score.parts),
            diagnostics=dict(score.diagnostics),
            counts=dict(score.counts),
            finish_reason=sample.finish_reason,
            num_tokens=len(sample.response_ids),
        )
