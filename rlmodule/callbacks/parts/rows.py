"""Samples as rows of JSON lines and of tables in loggers. Leaves out which samples those are (``callbacks/``)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmodule.records.metrics_log import atomic_write

Row = Mapping[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line; a reader sees the whole file or none."""
    # A lone surrogate has no UTF-8 form; its backslash escape is what JSON writes for it.
    with atomic_write(path) as aside, aside.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def evenly_spaced(rows: Sequence[Row], count: int) -> list[Row]:
    """``count`` rows at equal distances, so that many groups are shown."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def without_nan(value: Any) -> Any:
    """``value`` with None for numbers that JSON cannot write, at any depth."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
