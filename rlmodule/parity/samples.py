"""Fixed rollouts that are hard to cut evenly, made of the tokens of the user's own data.

Lengths from three tokens to the longest, every other prompt with two responses, tool tokens inside responses, one
response that could not be scored, and a last mini-batch of one sample, so that every rank but one runs a dummy. Leaves
out sampling: nothing is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlmodule.core.layout import Layout
from rlmodule.core.types import AdvantageInputs, Prompt, RewardResult, Sample, ScoredSample
from rlmodule.experience.sources import share_of_rank
from rlmodule.experience.timer import Timer
from rlmodule.parity.config import ParityConfig

SHORTEST = 3  # tokens: a prompt of one and a response of two
GOLDEN = 0.618034  # steps of it, modulo 1, are spread evenly and in no order


def make_samples(rows: Sequence[Prompt | Sample], config: ParityConfig) -> list[ScoredSample]:
    """The samples of one iteration of ``config.steps`` optimizer steps; ``rows`` lend their tokens."""
    tokens = _tokens_of(rows)
    count = (config.steps - 1) * config.samples_per_step + 1
    samples: list[ScoredSample] = []
    for number in range(count):
        asked = samples[-1].sample.prompt if number % 4 == 1 else None
        samples.append(_sample(number, config.max_length, tokens, asked))
    return samples


def _sample(number: int, max_length: int, tokens: Iterator[int], prompt: Prompt | None) -> ScoredSample:
    """A third of the sample is its prompt, unless there is one already."""
    spread = number * GOLDEN % 1
    length = round(SHORTEST * (max_length / SHORTEST) ** spread)
    prompt_len = max(1, length // 3)
    if prompt is None:
        prompt = Prompt(row=number, ids=tuple(itertools.islice(tokens, prompt_len)), text="")
    ids = torch.tensor(list(itertools.islice(tokens, length - prompt_len)))
    place = torch.arange(len(ids))
    mask = (place % 5 != 3) if number % 3 == 1 else torch.ones_like(place, dtype=torch.bool)
    sample = Sample(number, number // 2, prompt, ids, mask)
    return ScoredSample(sample, RewardResult(None if number == 1 else float(number % 2)))


def _tokens_of(rows: Sequence[Prompt | Sample]) -> Iterator[int]:
    for number in itertools.count():
        row = rows[number % len(rows)]
        if isinstance(row, Prompt):
            yield from row.ids
        else:
            yield from row.prompt.ids
            yield from row.response_ids.tolist()


@dataclass(frozen=True, eq=False)
class FixedSource:
    """Hands out samples that are there already; a ``Source``."""

    has_rewards: ClassVar[bool] = True
    is_fresh: ClassVar[bool] = False

    samples: Sequence[ScoredSample]
    layout: Callable[[], Layout]

    def collect(self, iteration: int, timer: Timer) -> list[ScoredSample]:
        """This rank's share."""
        return share_of_rank(self.samples, self.layout())


@dataclass(frozen=True)
class SyntheticAdvantage:
    """Advantages between -1 and 1 that depend on a sample's place alone."""

    needs: ClassVar[frozenset[str]] = frozenset()
    per_token: ClassVar[bool] = False

    def __call__(self, x: AdvantageInputs) -> Tensor:
        """[B] rewards -> [B] float64; 0 where the reward is missing."""
        made_up = torch.cos(torch.arange(len(x.reward), dtype=torch.float64) * 2.0 + 1.0)
        return torch.where(x.reward.isnan(), 0.0, made_up)
