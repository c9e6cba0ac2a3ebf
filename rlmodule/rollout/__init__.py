"""Menu of rollout engines: who draws the responses. The file name is the registry name."""

from __future__ import annotations

from rlmodule.core.registry import Registry

ROLLOUTS: Registry[object] = Registry("rollout", "rlmodule.rollout")
