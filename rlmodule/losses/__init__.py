"""The menu of policy losses: one file each, the file's name is the loss's name."""

from __future__ import annotations

from rlmodule.core.contract import Loss
from rlmodule.core.registry import Registry

LOSSES: Registry[Loss] = Registry("loss", "rlmodule.losses")
