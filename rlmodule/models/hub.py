"""The Hugging Face hub, where it does not answer: its client would try for half a minute before it says so."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, is_offline_mode

PATIENCE = 5.0  # seconds for one answer of any kind


def prefer_cache_if_unreachable(place: str) -> None:
    """Look for ``place`` in the hub's cache only, in this process and its children, when the hub cannot be reached."""
    if is_offline_mode() or Path(place).exists():
        return
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return  # an answer
    except OSError:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
