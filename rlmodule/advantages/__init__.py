"""Advantage estimators: one file per estimator; the name of the file is the name of the estimator."""

from __future__ import annotations

from rlmodule.core.contract import Advantage
from rlmodule.core.registry import Registry

ADVANTAGES: Registry[Advantage] = Registry("advantage", "rlmodule.advantages")
