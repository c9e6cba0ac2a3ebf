"""Episodes of one response, whose reward the run's reward function gives: rows of files, and most built-in problems."""

from __future__ import annotations

from dataclasses import dataclass

from rlmodule.core.episodes import Completion, Done, Observation
from rlmodule.core.types import Prompt


@dataclass(frozen=True)
class SingleTurnEpisode:
    """The prompt of a row, and one response."""

    row: Prompt

    @property
    def prompt(self) -> Observation:
        """The row's own prompt."""
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Done:
        """The first response is the last."""
        return Done()

    def cut(self) -> Done:
        """There is no turn that could be missing."""
        return Done()
