"""What to do where the Hugging Face hub cannot be reached: its client would retry for half a minute."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

PATIENCE = 5.0  # seconds until the hub counts as unreachable


def prefer_cache_if_unreachable(place: str) -> None:
    """Use only the hub's local cache, in this process and its children, if the hub cannot be reached for ``place``."""
    if is_offline_mode() or os.path.exists(place):
        return
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return  # any reply will do
    except OSError:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def is_cached(name: str) -> bool:
    """Whether the hub's local cache holds the configuration of a model."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # a path, which is no name on the hub
        return False
