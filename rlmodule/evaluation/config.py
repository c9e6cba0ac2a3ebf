"""How held-out prompts are answered: the section ``val``."""

from __future__ import annotations

from dataclasses import dataclass

from rlmodule.core.config import at_least, at_most, more_than
from rlmodule.core.episodes import Drawing
from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class ValConfig:
    """Answers per held-out prompt, and how they are drawn; lengths and ends are those of ``rollout``."""

    n: int = 1  # answers per prompt
    temperature: float = 0.0  # that answers are drawn at, whatever rollout.temperature is; 0 takes the likeliest token
    top_p: float = 1.0  # draw from the smallest set of tokens with this mass
    seed: int = 0  # keys the random numbers of answers and of the intervals

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)
        at_least("temperature", self.temperature, 0)
        more_than("top_p", self.top_p, 0)
        at_most("top_p", self.top_p, 1)
        if self.is_greedy and self.n > 1:
            raise ConfigError(
                key="n",
                got=self.n,
                because="val.temperature is 0, and greedy answers to one prompt are all the same",
                fix="Use val.temperature=1.0 to draw them, or val.n=1",
            )
        if self.is_greedy and self.top_p < 1:
            raise ConfigError(
                key="top_p",
                got=self.top_p,
                because="val.temperature is 0, and greedy answers are not drawn",
                fix="Use val.temperature=1.0 to draw them, or leave val.top_p out",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken instead of drawing one."""
        return self.temperature == 0

    @property
    def drawing(self) -> Drawing | None:
        """What engines are told; None where nothing is drawn."""
        return None if self.is_greedy else Drawing(self.temperature, self.top_p)
