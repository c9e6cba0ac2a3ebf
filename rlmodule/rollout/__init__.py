"""Menu of rollout engines: who samples the responses. The file name is the registry name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmodule.core.registry import Registry

if TYPE_CHECKING:
    from rlmodule.rollout.parts.engine import EngineConfig

ROLLOUTS: Registry[EngineConfig] = Registry("rollout", "rlmodule.rollout")
