"""Samples as rows of JSON lines and of tables in loggers. Leaves out which samples those are (``callbacks/``)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlmodule.core.types import ScoredSample
from rlmodule.records.metrics_log import atomic_write

Row = Mapping[str, Any]
# Line ends of Unicode, which JSON leaves as they are within texts and many a reader takes for the end of a row.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class Decoder(Protocol):
    """A tokenizer, as far as rows need one."""

    @property
    def decode(self) -> Callable[..., Any]:
        """Token ids -> text."""


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line; a reader sees the whole file or none."""
    with atomic_write(path) as aside, aside.open("wb") as file:
        file.writelines(json_line(row) for row in rows)


def json_line(row: Row, default: Callable[[Any], Any] | None = None) -> bytes:
    """A row as one line, whatever a reader takes for the end of a line; ``default`` is that of ``json.dumps``."""
    text = json.dumps(row, ensure_ascii=False, default=default).translate(_LINE_ENDS)
    # A lone surrogate has no UTF-8 form; its backslash escape is what JSON writes for it.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def evenly_spaced(rows: Sequence[Row], count: int) -> list[Row]:
    """``count`` rows at equal distances, so that many groups are shown."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def without_nan(value: Any) -> Any:
    """``value`` with None for numbers that JSON cannot write, at any depth."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_row(scored: ScoredSample, iteration: int, tokenizer: Decoder, sampling: Mapping[str, float]) -> dict[str, Any]:
    """One response as plain values; everything that ``data.rollouts`` needs to train on it again.

    ``logprobs`` are the sampler's, in nats, rounded to float32, under the distribution that ``sampling`` describes;
    ``loss_mask`` is present only if some token is not trained on, and ``token_versions`` (iterations that the policy
    which drew a token had been trained for) only if they differ; ``reward`` is null if the response could not be
    scored; ``reward_diagnostics`` has what a reward function reports beside its components.
    """
    sample, prompt = scored.sample, scored.sample.prompt
    row: dict[str, Any] = {
        "iteration": iteration,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "source": prompt.source,
        "prompt": prompt.text or tokenizer.decode(list(prompt.ids)),
        "response": sample.text or tokenizer.decode(sample.response_ids, skip_special_tokens=True),
        "answer": prompt.answer,
        "reward": _finite_or_none(scored.score.value),
        "reward_parts": {name: _finite_or_none(value) for name, value in sorted(scored.score.parts.items())},
        "finish_reason": sample.finish_reason,
        "prompt_ids": list(prompt.ids),
        "response_ids": sample.response_ids.tolist(),
        "logprobs": None if sample.rollout_logprob is None else sample.rollout_logprob.float().tolist(),
        "sampling": dict(sampling),
    }
    if logged := {**scored.score.diagnostics, **scored.score.counts}:
        row["reward_diagnostics"] = {name: _finite_or_none(value) for name, value in sorted(logged.items())}
    if sample.token_versions is not None:
        row["token_versions"] = sample.token_versions.tolist()
    if not bool(sample.loss_mask.all()):
        row["loss_mask"] = sample.loss_mask.int().tolist()
    return row


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
