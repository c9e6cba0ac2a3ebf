"""One stored response -> checked ids, mask, log-probabilities and reward. Token ids are used as they stand.

Leaves out files and groups (``rollouts.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlmodule.core.errors import DataError
from rlmodule.core.types import Prompt, RewardResult, Sample, ScoredSample
from rlmodule.data.chat import ChatError, ChatFormat, described
from rlmodule.data.row import read_turns
from rlmodule.data.tables import RawRow, RowTable
from rlmodule.data.tokens import encode_behind

# Field -> names of its column; of several in one file the first is read. Prompt and response must be there as
# ids or as text, and the reward; the rest may be missing.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids"),
    "prompt": ("prompt", "messages", "input"),
    "response_ids": ("response_ids", "completion_ids", "response_token_ids"),
    "response": ("response", "completion", "output"),
    "reward": ("reward", "score"),
    "reward_parts": ("reward_parts",),
    "group": ("group_id", "uid", "group"),
    "loss_mask": ("loss_mask", "response_mask", "completion_mask"),
    "logprobs": ("logprobs", "response_logprobs", "completion_logprobs", "rollout_log_probs"),
    "teacher_logprobs": ("teacher_logprobs", "teacher_logprob"),
    "finish_reason": ("finish_reason", "finish"),
    "sampling": ("sampling",),
}
NEEDED = (("prompt_ids", "prompt"), ("response_ids", "response"), ("reward",))
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Sampling:
    """How a response was drawn; decides whether its log-probabilities are those of the whole policy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def is_policy_at(self, temperature: float) -> bool:
        """Whether it was drawn from everything the policy might say at this temperature."""
        return self == Sampling(temperature)


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """One checked row.

    Args:
        prompt: ids and text; ``row`` counts over all files.
        response_ids: [R] int64.
        loss_mask: [R] bool.
        logprob: [R] float32 as drawn, 0 on tokens without loss; None where the row has none.
        teacher_logprob: likewise of a teacher.
        finish_reason: ``stop`` or ``length``.
        text: the response to read.
        score: the reward and its components.
        group: id of the row's group in the file; None makes a group of its own.
        sampling: how it was drawn, None where the row does not say.
        is_encoded: the ids were made from text.
    """

    prompt: Prompt
    response_ids: Tensor
    loss_mask: Tensor
    logprob: Tensor | None
    teacher_logprob: Tensor | None
    finish_reason: str
    text: str
    score: RewardResult
    group: str | None
    sampling: Sampling | None
    is_encoded: bool

    @property
    def length(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt.ids) + len(self.response_ids)

    def scored(self, sample_id: int, group_id: int) -> ScoredSample:
        """The row under the ids of a run."""
        sample = Sample(
            sample_id=sample_id,
            group_id=group_id,
            prompt=self.prompt,
            response_ids=self.response_ids,
            loss_mask=self.loss_mask,
            rollout_logprob=self.logprob,
            teacher_logprob=self.teacher_logprob,
            finish_reason=self.finish_reason,
            text=self.text,
        )
        return ScoredSample(sample, self.score)


@dataclass(frozen=True)
class RowReader:
    """Rows of one file -> checked responses.

    Args:
        columns: what a row says (a key of COLUMNS) -> the file's column, for those it has.
        tokenizer: for texts without ids.
        chat: gives how a prompt without ids becomes tokens, and the end token of responses without ids.
        vocab_size: ids the model has.
    """

    columns: Mapping[str, str]
    tokenizer: PreTrainedTokenizerBase
    chat: Callable[[], ChatFormat]
    vocab_size: int

    def __call__(self, raw: RawRow, row: int, location: str) -> StoredResponse:
        """Read one row.

        Raises:
            DataError: names the place, the column, the value and what to do.
        """
        value = {name: raw.get(column) for name, column in self.columns.items()}
        prompt_ids = self._ids(value.get("prompt_ids"), "prompt_ids", location)
        response_ids = self._ids(value.get("response_ids"), "response_ids", location)
        finish_reason = self._finish_reason(value.get("finish_reason"), location)
        is_encoded = response_ids is None or prompt_ids is None
        if response_ids is None:
            for name in ("logprobs", "teacher_logprobs"):
                if value.get(name) is not None:
                    raise self._error(location, name, "belong to token ids, and the row has a text only")
            response_ids = self._encoded(value.get("response"), finish_reason, location)
        if prompt_ids is None:
            prompt_ids = self._encoded_prompt(value.get("prompt"), location)
        mask = self._mask(value.get("loss_mask"), len(response_ids), location)
        return StoredResponse(
            prompt=Prompt(row=row, ids=tuple(prompt_ids.tolist()), text=_text_of(value.get("prompt"))),
            response_ids=torch.from_numpy(response_ids),
            loss_mask=torch.from_numpy(mask),
            logprob=self._logprobs(value, "logprobs", mask, location),
            teacher_logprob=self._logprobs(value, "teacher_logprobs", mask, location),
            finish_reason=finish_reason,
            text=_text_of(value.get("response")),
            score=self._score(value, location),
            group=None if value.get("group") is None else str(value["group"]),
            sampling=self._sampling(value.get("sampling"), location),
            is_encoded=is_encoded,
        )

    def _error(self, location: str, name: str, because: str, fix: str = "Fix or delete the row") -> DataError:
        return DataError(location=location, because=f"'{self.columns.get(name, name)}' {because}", fix=fix)

    def _ids(self, value: Any, name: str, location: str) -> NDArray[np.int64] | None:
        if value is None:
            return None
        ids = _as_array(value)
        if ids is None or ids.dtype.kind != "i":
            raise self._error(location, name, f"must be a list of token ids, this is {described(value)}")
        if not len(ids):
            raise self._error(location, name, "is empty", "Delete the row")
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(outside):
            because = (
                f"holds {ids[outside[0]]} at position {outside[0]}, and the model knows ids 0 to {self.vocab_size - 1}"
            )
            raise self._error(location, name, because, "Train the model that sampled them, or one with its tokenizer")
        return ids.astype(np.int64)

    def _encoded(self, value: Any, finish_reason: str, location: str) -> NDArray[np.int64]:
        """Text -> ids with the end token the policy would have drawn, unless the response was cut."""
        if not isinstance(value, str):
            raise self._error(
                location, "response", f"must be a text where there are no ids, this is {described(value)}"
            )
        end = [] if finish_reason == "length" else list(self.chat().end_tokens()[:1])
        ids = [*encode_behind(self.tokenizer, [value])[0], *end]
        if not ids or (finish_reason != "length" and not end):
            raise self._error(location, "response", "comes to no token, or the tokenizer has no end token")
        return np.array(ids, dtype=np.int64)

    def _encoded_prompt(self, value: Any, location: str) -> NDArray[np.int64]:
        if value is None:
            raise self._error(location, "prompt", "is missing, as text and as ids")
        try:
            [ids] = self.chat().encode_prompts([read_turns(value, self.columns["prompt"], location, {})])
        except ChatError as error:
            raise self._error(location, "prompt", f"cannot be encoded: {error}") from None
        if not ids:
            raise self._error(location, "prompt", "is empty", "Delete the row")
        return np.array(ids, dtype=np.int64)

    def _mask(self, value: Any, length: int, location: str) -> NDArray[np.bool_]:
        if value is None:
            return np.ones(length, dtype=np.bool_)
        mask = self._of_length(value, "loss_mask", length, location)
        if not np.isin(mask, (0.0, 1.0)).all():
            raise self._error(location, "loss_mask", f"must hold 0 and 1, this is {described(value)}")
        return mask.astype(np.bool_)

    def _logprobs(self, row: Mapping[str, Any], name: str, mask: NDArray[np.bool_], location: str) -> Tensor | None:
        value = row.get(name)
        if value is None:
            return None
        logprobs = self._of_length(value, name, len(mask), location)
        least = float(np.finfo(np.float32).min)  # what is below has no finite number in a float32
        wrong = np.flatnonzero(mask & ~((logprobs >= least) & (logprobs <= 0)))
        if len(wrong):
            because = (
                f"holds {value[wrong[0]]} at position {wrong[0]}, and a log-probability is a number of at most 0 that "
                "float32 can hold"
            )
            raise self._error(location, name, because, "Take the row's log-probabilities out, or delete the row")
        return torch.from_numpy(np.where(mask, logprobs, 0.0).astype(np.float32))

    def _of_length(self, value: Any, name: str, length: int, location: str) -> NDArray[np.float64]:
        """One number per response token, NaN for null; never filled up to length."""
        numbers = _as_array(value, float)
        if numbers is None:
            raise self._error(location, name, f"must be a list of numbers, this is {described(value)}")
        if len(numbers) != length:
            because = f"has {len(numbers)} entries for {length} response tokens"
            raise self._error(location, name, because, "Write one entry per token, or delete the row")
        return numbers

    def _finish_reason(self, value: Any, location: str) -> str:
        if value is not None and value not in FINISH_REASONS:
            raise self._error(
                location, "finish_reason", f"is {described(value)}", f"Use one of {', '.join(FINISH_REASONS)}"
            )
        return value or "stop"

    def _score(self, value: Mapping[str, Any], location: str) -> RewardResult:
        parts = value.get("reward_parts") or {}
        if not isinstance(parts, Mapping):
            raise self._error(location, "reward_parts", f"must be a mapping of numbers, this is {described(parts)}")
        numbers = {name: self._number(part, "reward_parts", location) for name, part in parts.items()}
        return RewardResult(
            self._number(value.get("reward"), "reward", location), {n: v for n, v in numbers.items() if v is not None}
        )

    def _number(self, value: Any, name: str, location: str) -> float | None:
        """None where a response could not be scored, NaN and infinity alike."""
        if value is None:
            return None
        if not isinstance(value, int | float):
            raise self._error(location, name, f"must be a number or null, this is {described(value)}")
        return float(value) if abs(value) <= sys.float_info.max else None

    def _sampling(self, value: Any, location: str) -> Sampling | None:
        if value is None:
            return None
        try:
            return Sampling(float(value["temperature"]), int(value["top_k"]), float(value["top_p"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            because = f"must hold temperature, top_k and top_p, this is {described(value)}"
            raise self._error(location, "sampling", because) from None


def choose_columns(table: RowTable) -> dict[str, str]:
    """Field -> the column of ``table`` that has it.

    Raises:
        DataError: a column that is needed is not in the file; names those that are.
    """
    chosen = {
        name: next((column for column in candidates if column in table.columns), None)
        for name, candidates in COLUMNS.items()
    }
    for alternatives in NEEDED:
        if all(chosen[name] is None for name in alternatives):
            wanted = " or ".join(f"'{column}'" for name in alternatives for column in COLUMNS[name])
            raise DataError(
                location=table.name,
                because=f"no column {wanted}; its columns are {', '.join(table.columns)}",
                fix="Rename the column that holds it",
            )
    return {name: column for name, column in chosen.items() if column is not None}


def _as_array(value: Any, dtype: type | None = None) -> NDArray[Any] | None:
    """A flat list as an array, None for null in it as NaN; None where it is no such list."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        return None
    try:
        array = np.asarray(value) if value else np.empty(0, dtype=np.int64)
        is_text = array.dtype.kind in "US"  # which would be read as the numbers that it spells
        return None if array.ndim != 1 or is_text else array if dtype is None else array.astype(dtype)
    except (TypeError, ValueError, OverflowError):
        return None


def _text_of(value: Any) -> str:
    """To read only; turns are not made into one."""
    return value if isinstance(value, str) else ""
