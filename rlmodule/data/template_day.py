"""The date that a chat template writes as that of today, which it asks the clock for.

Variables of templates are plain data, so the clock is answered within the template's text. Leaves out which day it is
(``run/today.py``).
"""

from __future__ import annotations

import json
import re
from datetime import date
from functools import lru_cache

NAME = "strftime_now"  # as transformers calls it
_CALL = re.compile(rf"""\b{NAME}\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""", re.DOTALL)


def asks_for_day(template: object) -> bool:
    """Whether a template, or one of several by name, asks for the date."""
    return NAME in str(template)


@lru_cache(maxsize=8)
def on_day(template: str, day: date) -> str:
    """The template with the date of ``day`` wherever it asks for that of today in a form that it writes out."""
    return _CALL.sub(lambda call: json.dumps(day.strftime(call[2]), ensure_ascii=False), template)
