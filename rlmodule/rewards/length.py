"""A penalty that grows with the length of a response: add it to another reward, ``reward=[math,length]``.

From ``start`` tokens on it falls in a straight line to ``penalty`` at ``limit`` tokens and stays there: the soft
overlong punishment of DAPO (arXiv:2503.14476, section 3.4: -1 at the limit, a buffer of 4,096 tokens before it). Below
``shortest`` tokens it is ``penalty`` too. ``algorithm.overlong_buffer`` does the same to any reward, but does not log
it as a component. What an environment showed is not counted. Leaves out lengths relative to the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlmodule.core.config import at_least
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import RewardResult, Sample
from rlmodule.rewards import REWARDS


@REWARDS.register
@dataclass(frozen=True)
class Length:
    """0 for a response of ordinary length, ``penalty`` for one that is too long or too short."""

    start: int  # tokens from which on a response is too long
    limit: int  # tokens at which the penalty is whole; a response that was cut is as long as can be
    penalty: float = -1.0  # score at the limit; positive for a bonus
    shortest: int = 0  # tokens; a response with fewer gets the whole penalty
    truncated: float | None = -1.0  # score of a response cut at the length limit; None leaves it unscored

    knows_one_response: ClassVar[bool] = False
    runs_apart: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("start", self.start, 0)
        at_least("shortest", self.shortest, 0)
        for name, got, least in (("limit", self.limit, self.start + 1), ("start", self.start, self.shortest)):
            if got < least:
                raise ConfigError(
                    key=name,
                    got=got,
                    because="the lengths must grow from shortest over start to limit",
                    fix=f"Use {name}={least} or more",
                )

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One score per sample, in order."""
        return [
            RewardResult(self.truncated if s.finish_reason == "length" else self.score(int(s.loss_mask.sum())))
            for s in samples
        ]

    def missing_fields(self, answer: str | None, columns: Mapping[str, Any]) -> str | None:
        """Nothing: the row is not read."""
        return None

    def score(self, tokens: int) -> float:
        """The penalty of a response of so many tokens."""
        share = 1.0 if tokens < self.shortest else (tokens - self.start) / (self.limit - self.start)
        return self.penalty * min(max(share, 0.0), 1.0)
