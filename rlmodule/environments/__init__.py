"""Built-in verifiable tasks: each file makes its own prompts and knows their answers. Leaves out scoring."""

from __future__ import annotations

from rlmodule.core.contract import Task
from rlmodule.core.registry import Registry

TASKS: Registry[Task] = Registry("task", "rlmodule.environments")
