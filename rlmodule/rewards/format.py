"""1 for a response that consists of the given tags, each once, in their order, else 0; for example
``<think>...</think><answer>...</answer>``. Leaves out what is inside: add another reward, ``reward=[math,format]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlmodule.core.errors import ConfigError
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS


@REWARDS.register
@dataclass(frozen=True)
class Format:
    """Each tag is opened once and closed once, has something in it, and none stands inside another."""

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])  # names, in the order in which they must come
    opened: bool = False  # whether the prompt ends with the first tag, as some chat templates do
    text_around: bool = False  # whether other text may stand before, between and after the tags
    empty: bool = False  # whether a tag may have nothing in it
    partial: bool = False  # score the share of tags that are there once and closed, instead of all or nothing
    truncated: float | None = 0.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False

    def __post_init__(self) -> None:
        wrong = [tag for tag in self.tags if not re.fullmatch(r"[\w:.-]+", tag)]
        if wrong or not self.tags or len(set(self.tags)) != len(self.tags):
            raise ConfigError(
                key="tags",
                got=self.tags,
                because="at least one tag is needed, each another word without brackets",
                fix="Use 'tags=[think,answer]'",
            )

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        return [
            RewardResult(self.truncated if sample.finish_reason == "length" else self.score(sample.text))
            for sample in samples
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing: the row is not read."""
        return None

    def score(self, text: str) -> float:
        """0 to 1."""
        text = f"<{self.tags[0]}>{text}" if self.opened else text
        if self.partial:
            return sum(self._is_there(text, tag) for tag in self.tags) / len(self.tags)
        if not all(self._is_there(text, tag) for tag in self.tags):
            return 0.0
        outside, position = [], 0
        for tag in self.tags:
            start = text.find(f"<{tag}>")
            if start < position:
                return 0.0  # in another order, or inside another tag
            outside.append(text[position:start])
            position = text.find(f"</{tag}>") + len(tag) + 3
        outside.append(text[position:])
        return float(self.text_around or not any(part.strip() for part in outside))

    def _is_there(self, text: str, tag: str) -> bool:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return False
        inside = text[text.find(f"<{tag}>") + len(tag) + 2 : max(0, text.find(f"</{tag}>"))]
        return text.find(f"<{tag}>") < text.find(f"</{tag}>") and (self.empty or bool(inside.strip()))
