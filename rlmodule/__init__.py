"""RL post-training of language models as a Lightning module; the numbers do not depend on how the work is cut."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Name -> module; imported when asked for, since torch takes seconds. docs/library.md shows their use.
_PUBLIC = {
    "AlgorithmConfig": "rlmodule.algorithm.config",
    "BatchingConfig": "rlmodule.batching.sampler",
    "CriticConfig": "rlmodule.algorithm.critic",
    "DataConfig": "rlmodule.data.config",
    "ModelConfig": "rlmodule.models.description",
    "Run": "rlmodule.run.run",
    "RunConfig": "rlmodule.run.config",
    "RunDirectory": "rlmodule.records.run_directory",
    "SamplingConfig": "rlmodule.rollout.parts.sampling",
    "TrainerConfig": "rlmodule.run.trainer_config",
    "WarmStart": "rlmodule.run.warm_start",
    "WarmStartConfig": "rlmodule.run.config",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
