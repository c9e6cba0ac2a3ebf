"""The settings that engines with servers share; each adds its own keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from rlmodule.core.api_keys import check_key_name, key_in
from rlmodule.core.config import at_least, more_than, one_of
from rlmodule.core.episodes import WAIT
from rlmodule.core.errors import ConfigError

AUTO = "auto"
NO_ADDRESS = "it is no address of a server"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ServerSettings:
    """How servers are reached, and what they are given and trusted with."""

    url: Any = None  # address of a running server, http://HOST:PORT, or a list of them
    num_requests: int = 64  # in flight at a time, from each data rank to each server
    max_prompt_length: int = 1024  # tokens of a prompt at most, which with a response a server must hold
    dtype: str = AUTO  # servers compute in it: float32, bfloat16, float16; auto: as the trainer does
    weights_dir: str | None = None  # folder for new weights on their way; null: shared memory, else the run directory
    start_seconds: float = 1800.0  # until a server must be ready, and until a lost one must be back
    timeout_seconds: float = 1800.0  # for one response
    sleep: bool = False  # servers give their device memory back while the trainer trains
    api_key_env: str = ""  # name of the environment variable with the servers' key; empty: none is sent

    in_process: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for address in self.urls:
            _check_address(address)
        if twice := next((address for address in self.urls if self.urls.count(address) > 1), None):
            because = f"{twice} stands in it twice"
            raise ConfigError(key="url", got=self.url, because=because, fix="Give each server once")
        check_key_name(self.api_key_env)
        at_least("num_requests", self.num_requests, 1)
        at_least("max_prompt_length", self.max_prompt_length, 1)
        more_than("start_seconds", self.start_seconds, 0)
        more_than("timeout_seconds", self.timeout_seconds, 0)
        one_of("dtype", self.dtype, (AUTO, *DTYPES))

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the running servers; none where the run starts its own."""
        given = self.url if isinstance(self.url, list | tuple) else [] if self.url is None else [self.url]
        return tuple(str(address).rstrip("/").removesuffix("/v1") for address in given)

    def places(self, row_bytes: int) -> int | None:
        """No limit: servers see to their own memory."""
        return None

    def check_here(self) -> None:
        """Refuse a key that is not there, or cannot be sent."""
        key_in(self.api_key_env, section="rollout.")

    @property
    def pauses(self) -> tuple[str, ...]:
        """What its servers can do with responses under way; none where they sleep while the trainer trains."""
        return () if self.sleep else (WAIT, *self.own_pauses)

    @property
    def own_pauses(self) -> tuple[str, ...]:
        """What they can do beside letting responses end."""
        return ()

    def promised_dtype(self, trainer: torch.dtype | None) -> torch.dtype:
        """What servers compute in; ``trainer`` is its compute type, None for that of float32 weights."""
        return DTYPES[self.dtype] if self.dtype != AUTO else trainer or torch.float32


def _check_address(address: str) -> None:
    """Refuse what cannot be asked, and what would be asked without a part of it.

    Raises:
        ConfigError: a password in it is not repeated.
    """
    try:
        parts = urlsplit(address)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
        beside = parts.path or parts.query or parts.fragment or " " in address
        why = "" if parts.scheme in ("http", "https") and host and not beside else NO_ADDRESS
        has_name = "@" in parts.netloc
    except ValueError as error:  # of a port, brackets, or a name that no host can have
        why, has_name = f"{NO_ADDRESS}: {error}", "@" in address
    if has_name:
        why, address = "it holds a name or a password, which would not be sent", f"...@{address.rpartition('@')[2]}"
    if why:
        fix = "Use url=http://HOST:PORT, and api_key_env=NAME where the server wants a key"
        raise ConfigError(key="url", got=address, because=why, fix=fix)
