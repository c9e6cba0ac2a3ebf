"""Optimizers: one file per optimizer; the name of the file is the name of the optimizer."""

from __future__ import annotations

from rlmodule.core.registry import Registry
from rlmodule.optim.parts.config import OptimizerConfig

OPTIMIZERS: Registry[OptimizerConfig] = Registry("optimizer", "rlmodule.optim")
