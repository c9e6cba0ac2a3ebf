"""An environment of your own, a class in a file: ``environment=custom environment.path=my_environment.py:Mine``.

The class is a frozen dataclass with what ``rlmodule.core.contract.Environment`` asks for. Leaves out rewards alone,
which need no class (``reward=function``).
"""

from __future__ import annotations

import dataclasses
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlmodule.core.config import convert
from rlmodule.core.contract import Environment
from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.core.sandbox.pool import load_function
from rlmodule.environments import ENVIRONMENTS

NEEDED = ("rows", "start", "has_many_answers", "gives_rewards")


@ENVIRONMENTS.register
@dataclass(frozen=True)
class Custom:
    """Imports the class in this process and makes it with ``arguments``, which are its fields."""

    path: str  # package.module:Class, or path/to/file.py:Class
    arguments: dict[str, Any] = field(default_factory=dict)  # fields of the class

    @cached_property
    def environment(self) -> Environment:
        """The environment.

        Raises:
            ConfigError: there is no such class, it lacks something, or an argument is wrong.
        """
        made = self._class
        try:
            environment: Any = convert(made, self.arguments, "environment.arguments")
        except RLModuleError:
            raise
        except (Exception, SystemExit) as error:
            raise self._error(f"it cannot be made: {type(error).__name__}: {error}", "Correct it") from None
        missing = [name for name in NEEDED if not hasattr(environment, name)]
        if missing:
            raise self._error(f"the class has no {missing[0]!r}", f"It needs {', '.join(NEEDED)}")
        return environment  # type: ignore[no-any-return]

    @property
    def _class(self) -> type:
        location, _, name = self.path.rpartition(":")
        if not location or not name:
            raise self._error("it does not say which class of which module", "Write path/to/file.py:Class")
        if location.endswith(".py") and not Path(location).is_file():
            raise self._error(f"no file {Path(location).resolve()}", "Correct it")
        try:
            found = load_function(self.path)
        except (Exception, SystemExit):
            raise self._error("it cannot be imported", f"Its own words:\n{traceback.format_exc(limit=-3)}") from None
        if not isinstance(found, type) or not dataclasses.is_dataclass(found):
            raise self._error("it is no dataclass", f"Write @dataclass(frozen=True) above class {name}")
        return found

    def _error(self, because: str, fix: str) -> ConfigError:
        return ConfigError(key="environment.path", got=self.path, because=because, fix=fix)
