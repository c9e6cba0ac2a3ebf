"""JSON text -> values that can be written again. Leaves out files (``files.py``)."""

from __future__ import annotations

import json
import re
from typing import Any

HALF_PAIR = "it holds half of a surrogate pair, which is not valid Unicode"

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of one, paired or not


def load_json(text: str) -> Any:
    """The value that ``text`` stands for.

    Raises:
        ValueError: it is not JSON, or holds text that is not valid Unicode, which nothing could write or print later.
    """
    value = json.loads(text)
    if _SURROGATE.search(text) and not is_unicode(value):
        raise ValueError(HALF_PAIR)
    return value


def is_unicode(value: Any) -> bool:
    """Whether every text in the value has a UTF-8 form."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
