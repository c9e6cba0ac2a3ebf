"""The rollout engine over the life of a run: built and started once, given new weights when they changed, closed once.

Leaves out what an engine does with its weights (``rollout/``) and who asks for responses (``sources.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlmodule.core.contract import ConcurrentEngine, ProvableEngine, RolloutEngine
from rlmodule.experience.canary import Canary


@dataclass(eq=False)
class LiveEngine:
    """Gives the engine of a run whenever it is called, with the policy's weights of that moment.

    Every rank calls it equally often: new weights may be a collective.

    Args:
        build: makes the engine; called at the first use, when the strategy is set up.
        weights: streams the policy's weights, (Hugging Face name, whole tensor), see ``Strategy.full_weights``.
        version: iterations of training behind the policy's weights now.
        canary: proves after every update that the engine has them; None believes it.
    """

    build: Callable[[], RolloutEngine]
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    version: Callable[[], int]
    canary: Canary | None = None
    _engine: RolloutEngine | None = field(default=None, init=False)
    _loaded: int | None = field(default=None, init=False)  # version of the weights that the engine has

    def __call__(self) -> RolloutEngine:
        """The engine, started and up to date."""
        if self._engine is None:
            self._engine = self.build()
            self._engine.start()
        version = self.version()
        if version != self._loaded:
            weights = self.weights() if self._engine.takes_weights else iter(())
            self._engine.update_weights(weights, version)
            if self.canary is not None and isinstance(self._engine, ProvableEngine):
                self.canary(self._engine)
            if isinstance(self._engine, ConcurrentEngine):
                self._engine.resume()
            self._loaded = version
        return self._engine

    @property
    def promised_dtype(self) -> torch.dtype | None:
        """What its copy of the policy computes in; None where it has none, or is not there."""
        return self._engine.promised_dtype if isinstance(self._engine, ProvableEngine) else None

    def close(self) -> None:
        """Close the engine, where one was built; a later call would build another."""
        engine, self._engine, self._loaded = self._engine, None, None
        if engine is not None:
            engine.close()
