"""Values of data files as text. Leaves out reading files (``data/``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_EXACT_WHOLE_NUMBER = 2**53  # float64 holds every whole number up to here


def plain_number(value: Decimal) -> int | float | str:
    """The number as Python's own type: whole numbers as int; as text where a float has not all of its digits."""
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def as_text(value: Any) -> str | None:
    """An answer of a data file as text; None where there is none.

    Numbers are written out, whole ones without a decimal point: a column of whole numbers with gaps comes from many
    tools as floating-point numbers, or as decimals. Lists and mappings become JSON.
    """
    if value is None:
        return None
    if isinstance(value, Decimal):
        value = plain_number(value) if value.is_finite() else math.nan
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return str(int(value)) if value.is_integer() and abs(value) <= _EXACT_WHOLE_NUMBER else json.dumps(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, bool | int | list | tuple | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)  # dates and the like
