"""Menu of built-in environments: each file makes its own rows and says what follows a response.

Leaves out rewards that a function gives (``rewards/``) and how episodes are run (``experience/episodes.py``).
"""

from __future__ import annotations

from rlmodule.core.contract import Environment, EnvironmentSource
from rlmodule.core.registry import Registry

ENVIRONMENTS: Registry[Environment | EnvironmentSource] = Registry("environment", "rlmodule.environments")
