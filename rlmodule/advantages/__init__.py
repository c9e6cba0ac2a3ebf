"""The menu of advantage estimators: one file each, the file's name is the estimator's name."""

from __future__ import annotations

from rlmodule.core.contract import Advantage
from rlmodule.core.registry import Registry

ADVANTAGES: Registry[Advantage] = Registry("advantage", "rlmodule.advantages")
