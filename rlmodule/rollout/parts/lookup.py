"""Guesses of the tokens that come next, looked up in what a response and its prompt have said before.

Where the last tokens of a row stand earlier in it, what followed them there is the guess (prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding). Leaves out how guesses are checked (``rollout/hf.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmodule.core.episodes import GenerationRequest
from rlmodule.rollout.parts.decoding import DecodingBatch

MATCHED = 3  # tokens at the end of a row that must stand earlier in it


@dataclass(eq=False)
class History:
    """The tokens of one row.

    Args:
        tokens: of its prompt and what was drawn.
        drawn: how many of them were drawn.
        following: every ``MATCHED`` tokens that another one follows -> the place of that one, the last time.
    """

    tokens: list[int] = field(default_factory=list)
    drawn: int = 0
    following: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            if len(self.tokens) >= MATCHED:
                self.following[tuple(self.tokens[-MATCHED:])] = len(self.tokens)
            self.tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the last ones before."""
        place = self.following.get(tuple(self.tokens[-MATCHED:]))
        return [] if place is None else self.tokens[place : place + count]


@dataclass(eq=False)
class Lookup:
    """Histories of rows by their sample ids; ``count`` tokens are guessed for each at most."""

    count: int
    histories: dict[int, History]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], count: int) -> Lookup:
        """Before the first token of each is drawn."""
        histories = {request.sample_id: History() for request in requests}
        for request in requests:
            histories[request.sample_id].extend(request.prompt_ids)
        return cls(count, histories)

    def join(self, other: Lookup) -> None:
        """Take in the rows of ``other``."""
        self.histories |= other.histories

    def guesses(self, batch: DecodingBatch) -> list[list[int]]:
        """For each live row the tokens that may come next; none where it would end before them."""
        rows, live = batch.rows, batch.live
        found = []
        facts = (rows.sample_ids, rows.lengths, rows.max_tokens)
        for row, sample_id, length, most in zip(live.tolist(), *(x[live].tolist() for x in facts), strict=True):
            history = self.histories[sample_id]
            history.extend(rows.tokens[row, history.drawn : length].tolist())
            history.drawn = length
            found.append(history.guess(min(self.count, most - length - 1)))
        return found
