"""Who samples responses: any responder, an engine of a run, and engines that can be proven or run beside training."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlmodule.core.contract.ranks import Item
from rlmodule.core.episodes import Completion, GenerationRequest, Probe


class Responder(Protocol):
    """Responds to requests, as far as whoever runs episodes needs to know."""

    @property
    def version(self) -> int:
        """Iterations of training behind the weights that it samples with."""

    def generate(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """One completion per request, in the order they finish; closing the generator gives up those in flight.

        Args:
            requests: read as far as there is room, again after each completion. None says that there is no request at
                the moment; the caller gives it only while some are in flight, and may have more once it has received
                their completions.
        """


class RolloutEngine(Responder, Protocol):
    """Samples responses of the policy, from ``start`` to ``close`` of a run. Every rank has one and calls it in step,
    ``generate`` too, also without requests.

    Random numbers are keyed by (seed, sample id, position), so the engine that draws a sample, and what is drawn
    beside it, change nothing.
    ``takes_weights``: it samples from a copy of the policy, which ``update_weights`` fills. One that samples from the
    module being trained reads no weights, and is given an empty stream so that nothing is gathered.
    """

    takes_weights: ClassVar[bool]

    def start(self) -> None:
        """Acquire what the engine needs; called once, before anything else, with the strategy set up."""

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights from now on; called between two calls of ``generate``.

        Args:
            weights: (Hugging Face name, whole tensor), one at a time and the same on every rank. Making each is a
                collective of a sharded strategy, so every rank reads the stream to its end.
            version: iterations of training behind them.
        """

    def close(self) -> None:
        """Release everything; called at the end of a run, also after an error. Calling it again does nothing."""


@runtime_checkable
class ProvableEngine(RolloutEngine, Protocol):
    """An engine with a copy of the policy that can be asked what it makes of given tokens.

    After every ``update_weights`` its answers are compared with the policy's own log-probabilities, and the run ends
    where they differ by more than the copy's rounding.
    """

    @property
    def promised_dtype(self) -> torch.dtype:
        """What the copy computes in, which bounds its rounding."""

    def probe(self) -> Iterator[list[Probe]]:
        """Fixed sequences as each copy sees them, in parts, the same on every rank; every rank reads all of them.

        Copies answer the next part while the policy scores the one before.
        """

    def likely_stale(self) -> str:
        """Which weights did not change with the last update, in words; empty where that is not known."""


@runtime_checkable
class ConcurrentEngine(RolloutEngine, Protocol):
    """An engine that responds beside training: in threads, while its other methods are called.

    ``update_weights`` may come while responses are under way; ``Completion.versions`` says what drew which token. No
    request goes out from then until ``resume``.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this rank asks; the others repeat the tokens of one that does."""

    def beside(self) -> Responder:
        """Responds in any thread of a rank that asks, without the other ranks; ``close`` ends what is under way.

        Every rank calls it, since from then on requests may be under way while weights change.
        """

    def resume(self) -> None:
        """Let requests go out again, once the new weights are proven."""

    def shared(self, work: Callable[[], Item]) -> Item:
        """What ``work`` gives on the rank that asks, also on those that repeat its tokens; every rank calls it.

        Raises:
            RLModuleError: on all of these, where it failed.
        """
