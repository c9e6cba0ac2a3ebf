"""Uploading a folder to the Hugging Face hub, and whether that can work at all, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from rlmodule.core.errors import ConfigError, in_one_line
from rlmodule.core.hub import prefer_cache_if_unreachable

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
KEY = "command.push"


def check_push(repository: str) -> None:
    """Refuse an upload that cannot work.

    Raises:
        ConfigError: no name of a repository, the hub cannot be reached, or nobody is logged in.
    """
    if _NAME.fullmatch(repository) is None:
        raise ConfigError(
            key=KEY, got=repository, because="it is no name of a repository on the hub", fix=f"Use {KEY}=ORG/NAME"
        )
    prefer_cache_if_unreachable(repository)
    if is_offline_mode():
        raise ConfigError(
            key=KEY,
            got=repository,
            because=f"{constants.ENDPOINT} cannot be reached from here, or HF_HUB_OFFLINE is set",
            fix="Leave it out, and upload the folder later: hf upload ORG/NAME FOLDER",
        )
    try:
        HfApi().whoami()
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise _refused(repository, error) from error


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder; returns its address.

    Raises:
        ConfigError: the hub refuses it.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise _refused(repository, error) from error
    return f"{constants.ENDPOINT}/{repository}"


def _refused(repository: str, error: Exception) -> ConfigError:
    return ConfigError(
        key=KEY,
        got=repository,
        because=f"the hub refuses it ({in_one_line(error)})",
        fix="Log in with `hf auth login`, or set HF_TOKEN to a token that may write there",
    )
