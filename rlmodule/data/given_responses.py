"""Rows with given responses -> samples, made when they are needed: one to imitate, or a better and a worse one.

Every row is read, encoded and measured once at the start; after that memory holds lengths, and the samples of the first
``HELD_TOKENS``, so that small files are not encoded again in every pass. Leaves out what rows look like
(``demonstrations.py``, ``preferences.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.chat import Segment, join, prompt_text
from rlmodule.data.config import DataConfig
from rlmodule.data.prompts import keep_by_length
from rlmodule.data.row import Row
from rlmodule.data.tables import LazyRows, in_batches

HELD_TOKENS = 1 << 21  # about 30 MB

Encoded = Sequence[tuple[Row, list[Segment]]]  # of each response of a row; the first segment is the prompt


@dataclass(frozen=True)
class ResponseRows:
    """Rows that can be encoded by position.

    Args:
        count: how many.
        num_responses: of each.
        encode: positions -> the encoded rows, in the same order.
        location: position -> ``file:line``.
    """

    count: int
    num_responses: int
    encode: Callable[[Sequence[int]], Sequence[Encoded]]
    location: Callable[[int], str]


class ResponseTable(LazyRows[tuple[Sample, ...]]):
    """The samples of each row that is in use.

    Args:
        rows: where they come from.
        config: limits, and what becomes of rows beyond them.
        tokenizer: of the model.
        extended: with one more token behind each response, as reward models read them.

    Raises:
        DataError: a row cannot be used, or is longer than a limit allows; or none is left.
    """

    def __init__(
        self, rows: ResponseRows, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, extended: bool = False
    ) -> None:
        self._rows, self._config, self._tokenizer, self._extended = rows, config, tokenizer, extended
        self._held: dict[int, tuple[Sample, ...]] = {}
        self._bad: dict[int, DataError] = {}  # rows that cannot be used, where they are left out
        prompts, lengths, self.largest_ids = self._measure()
        is_kept = np.zeros(rows.count, dtype=bool)
        is_kept[keep_by_length(prompts, config, rows.location)] = True
        is_kept[list(self._bad)] = False
        cut = np.minimum(prompts, config.max_prompt_length) - prompts  # of truncated prompts, not positive
        lengths = lengths + cut[:, None]
        self.kept = np.flatnonzero(is_kept & self._fits(lengths, is_kept))
        if not len(self.kept):
            raise next(iter(self._bad.values()))
        limit = config.max_demonstration_length
        self.lengths = (lengths if limit is None else np.minimum(lengths, limit))[self.kept] + int(extended)
        self.largest_ids = self.largest_ids[self.kept]
        self.num_filtered = int(is_kept.sum()) - len(self.kept)
        self.num_truncated = 0 if limit is None else int((lengths[self.kept] > limit).any(axis=1).sum())
        for position in set(self._held) - set(self.kept.tolist()):
            del self._held[position]

    def __len__(self) -> int:
        return len(self.kept)

    def location(self, index: int) -> str:
        """``file:line`` of a row in use."""
        return self._rows.location(int(self.kept[index]))

    def select(self, indices: Sequence[int]) -> list[tuple[Sample, ...]]:
        """The samples of these rows; ``Prompt.row`` and the ids count rows before filtering, over all files."""
        positions = [int(self.kept[index]) for index in indices]
        missing = [position for position in positions if position not in self._held]
        made = {
            position: self._samples(position, encoded)
            for position, encoded in zip(missing, self._rows.encode(missing) if missing else (), strict=True)
        }
        return [self._held.get(position) or made[position] for position in positions]

    def describe(self) -> str:
        """Rows that are left out or cut, for the run's plan; empty where there are none."""
        parts = [(self.num_filtered, "longer ones left out"), (self.num_truncated, "cut at the end")]
        text = "".join(f", {count} {what}" for count, what in parts if count)
        if self._bad:
            text += f", {len(self._bad)} that cannot be used left out (the first: {next(iter(self._bad.values()))})"
        return text

    def _measure(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """[rows] tokens of each prompt, [rows, responses] tokens of each sample, [rows] largest token id.

        The prompt is counted as it is written, before truncation.
        """
        prompts, lengths, largest, held = array("q"), array("q"), array("q"), 0
        for positions in in_batches(self._rows.count):
            for position, encoded in zip(positions, self._encoded(positions), strict=True):
                if encoded is None:
                    prompts.append(0)
                    lengths.extend([0] * self._rows.num_responses)
                    largest.append(0)
                    continue
                counts = [sum(len(part.ids) for part in segments) for _, segments in encoded]
                prompts.append(len(encoded[0][1][0].ids))
                lengths.extend(counts)
                largest.append(max(max(part.ids, default=0) for _, segments in encoded for part in segments))
                held += sum(counts)
                if held <= HELD_TOKENS:
                    self._held[position] = self._samples(position, encoded)
        shape = (self._rows.count, self._rows.num_responses)
        return np.array(prompts), np.array(lengths).reshape(shape), np.array(largest)

    def _encoded(self, positions: Sequence[int]) -> Sequence[Encoded | None]:
        """The rows, None for those that cannot be used under the rule ``bad_demonstration=filter``."""
        try:
            return self._rows.encode(positions)
        except DataError:
            if self._config.bad_demonstration == "error":
                raise
        return [self._encoded_alone(position) for position in positions]

    def _encoded_alone(self, position: int) -> Encoded | None:
        try:
            return self._rows.encode([position])[0]
        except DataError as error:
            self._bad[position] = error
            return None

    def _fits(self, lengths: NDArray[np.int64], is_kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[rows] whether a row stays in use under the rule ``overlong_demonstration``."""
        limit, rule = self._config.max_demonstration_length, self._config.overlong_demonstration
        is_long = np.zeros(len(lengths), dtype=bool) if limit is None else (lengths > limit).any(axis=1) & is_kept
        if not is_long.any() or rule == "truncate":
            return self._trainable(is_long) if is_long.any() else ~is_long
        if rule == "error":
            first = int(is_long.argmax())
            raise DataError(
                location=self._rows.location(first),
                because=f"prompt and response have {lengths[first].max()} tokens, data.max_demonstration_length is "
                f"{limit} ({is_long.sum()} of {len(lengths)} rows are longer)",
                fix=f"Use data.max_demonstration_length={lengths.max()}, or data.overlong_demonstration=filter or "
                "truncate",
            )
        return self._some_left(~is_long & is_kept)

    def _trainable(self, is_long: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[rows] whether something that is trained stays of a row that is cut at its end."""
        left = np.ones(len(is_long), dtype=bool)
        for position in map(int, np.flatnonzero(is_long)):
            [encoded] = self._rows.encode([position])
            left[position] = all(sample.loss_mask.any() for sample in self._samples(position, encoded))
        return self._some_left(left)

    def _some_left(self, left: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not left.any():
            raise DataError(
                location=self._rows.location(0),
                because=f"data.overlong_demonstration={self._config.overlong_demonstration} leaves no row that has "
                f"something to learn within data.max_demonstration_length={self._config.max_demonstration_length}",
                fix="Raise the limit",
            )
        return left

    def _samples(self, position: int, encoded: Encoded) -> tuple[Sample, ...]:
        location, number = self._rows.location(position), self._rows.num_responses
        made = [
            replace(self._sample(position, row, segments, location), sample_id=number * position + which)
            for which, (row, segments) in enumerate(encoded)
        ]
        return tuple(sample.extended_by_one() if self._extended else sample for sample in made)

    def _sample(self, position: int, row: Row, segments: Sequence[Segment], location: str) -> Sample:
        """The sample of a row; its first segment is the prompt, which keeps its last tokens."""
        prompt, *rest = segments
        prompt_ids = prompt.ids[-self._config.max_prompt_length :]
        ids, mask = join(rest)
        limit = self._config.max_demonstration_length
        room = len(ids) if limit is None else max(0, limit - len(prompt_ids))
        return Sample(
            sample_id=position,
            group_id=position,
            prompt=Prompt(
                row=position,
                ids=prompt_ids,
                text=prompt_text(row.prompt),
                answer=row.answer,
                source=row.source,
                meta=row.meta,
                answer_value=row.answer_value,
                location=location,
            ),
            response_ids=torch.tensor(ids[:room], dtype=torch.int64),
            loss_mask=torch.tensor(mask[:room], dtype=torch.bool),
            finish_reason="stop" if room >= len(ids) else "length",
            text=str(self._tokenizer.decode(ids[:room], skip_special_tokens=True)),
        )
