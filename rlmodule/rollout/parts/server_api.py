"""What an engine asks of a server, whatever the dialect it is asked in.

Leaves out HTTP (``http_client.py``), dialects (``completions.py``, ``vllm_api.py``, ``sglang_api.py``) and who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """One response to draw. Every value is sent, so that none is left to a server's defaults.

    Args:
        prompt_ids: every token before the response.
        max_tokens: of the response at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p, top_k: which tokens may be drawn; 0 for all.
        seed: of the request's own random numbers.
        end_ids: token ids that end it, and stay in it; no other token does.
        end_texts: texts that end it.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    end_texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A response as a server gives it.

    Args:
        token_ids, logprobs: [R].
        finish_reason: ``stop``, ``length``, or ``abort`` where it was cut off; it may then be empty.
        versions: [R] of the weights that drew each token; empty where the server does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself, with its own names; None where it does not say.

    Args:
        software: its name and version.
        dtype: that it computes in: float32, bfloat16 or float16.
        quantization: of its weights.
        max_length: tokens of prompt and response together.
        defaults: sampling values that it takes for a request which does not name them.
    """

    software: str
    dtype: str | None = None
    quantization: str | None = None
    max_length: int | None = None
    defaults: Mapping[str, object] | None = None


class ServerApi(Protocol):
    """One server, asked in its own dialect.

    Every method raises ServerGoneError or ServerRefusedError of ``http_client.py``.
    ``lacks`` are what no server of this dialect can do, in words for people.
    """

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """What it cannot do, each in a few words."""

    def knock(self) -> None:
        """Ask whether it is ready, which it refuses where it still loads."""

    def is_ready(self) -> bool:
        """Whether it answers; False where there is no server, or it still loads."""

    def facts(self) -> ServerFacts:
        """What it says of itself."""

    def draw(self, draw: Draw) -> Drawn:
        """One response."""

    def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities of ``ids[1:]``, each after those before it, at temperature 1."""

    def likeliest(self, draw: Draw, count: int) -> Mapping[int, float]:
        """The ``count`` likeliest next tokens after a prompt, with the log-probabilities it gives them."""

    def load(self, folder: Path, version: int) -> None:
        """Take weights from a folder, and forget the keys and values of earlier ones."""

    def load_adapter(self, folder: Path, version: int) -> None:
        """Take an adapter from a folder, and answer with it from now on; likewise."""

    def version(self) -> str | None:
        """Of its weights, as ``load`` named it; None where it does not say."""

    def checksums(self) -> Mapping[str, str]:
        """A digest of each tensor, by the server's own names; empty where it gives none."""

    def pause(self, mode: str) -> None:
        """Draw no further token until ``resume``; requests under way are cut off (``abort``), or kept (``keep``)."""

    def resume(self) -> None:
        """Go on, with kept requests and new ones."""

    def sleep(self) -> None:
        """Give the device memory of weights, keys and values back until ``wake_up``."""

    def wake_up(self) -> None:
        """Take it again, with the same weights."""

    def hang_up(self) -> None:
        """Give up every request under way."""

    def close(self) -> None:
        """Close the connections to it; it runs on."""


class WeightTransfer(Protocol):
    """Weights from the trainer's device to those of servers, without a folder between them."""

    def send(self, servers: Sequence[Any], weights: Iterable[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Have servers of its dialect take the weights off a strategy's stream; address -> why, for those that did not.

        A server that is lost in it is left out of the next one too, unless it can be reached anew.
        """

    def close(self) -> None:
        """Leave what was joined for it."""
