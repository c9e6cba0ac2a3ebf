"""Policy losses: one file per loss; the name of the file is the name of the loss."""

from __future__ import annotations

from rlmodule.core.contract import Loss
from rlmodule.core.registry import Registry

LOSSES: Registry[Loss] = Registry("loss", "rlmodule.losses")
