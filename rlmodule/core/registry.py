"""Registry of components: a component is named after its module, which is imported only when it is used.

Strategies have a registry of their own, because their key has four parts (``strategies/registry.py``).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Generic, TypeVar

from rlmodule.core.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Components of one kind, found by module name inside one package.

    Args:
        kind: singular noun for messages, e.g. ``loss``; also the config group.
        package: dotted package whose modules are the components.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._classes: dict[str, type[T]] = {}

    def register(self, component: type[T]) -> type[T]:
        """Class decorator: registers the class under the last part of its module's name.

        Raises:
            ValueError: another class already has that name.
        """
        name = name_of(component)
        taken = self._classes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (
            component.__module__,
            component.__qualname__,
        ):
            raise ValueError(
                f"{self.kind} '{name}' is already {taken.__module__}.{taken.__qualname__}; "
                f"{component.__module__}.{component.__qualname__} cannot take its name"
            )
        self._classes[name] = component
        return component

    def names(self) -> list[str]:
        """Names of all components, without importing them; sub-packages hold shared code and are not listed."""
        paths = importlib.import_module(self.package).__path__
        return sorted({m.name for m in pkgutil.iter_modules(paths) if not m.ispkg} | set(self._classes))

    def get(self, name: str, key: str | None = None) -> type[T]:
        """The class called ``name``.

        Args:
            name: one of ``names()``.
            key: full dotted key of the name, for the error; by default ``kind``, the config group.

        Raises:
            ConfigError: no such component; lists the known and the nearest names.
        """
        if name not in self._classes:
            if name not in self.names():
                raise ConfigError(
                    key=key or self.kind,
                    got=name,
                    because=f"no {self.kind} has that name",
                    fix=did_you_mean(name, self.names()),
                )
            importlib.import_module(f"{self.package}.{name}")
        assert name in self._classes, f"{self.package}.{name} does not register a {self.kind}"
        return self._classes[name]

    def chosen(self, section: object, key: str | None = None) -> type[T]:
        """The class that a section of the configuration names.

        Args:
            section: with a key ``name``.
            key: dotted key of the section; by default ``kind``.

        Raises:
            ConfigError: none is named, or none that there is.
        """
        name = section.get("name") if isinstance(section, Mapping) else None
        if name is None:
            raise ConfigError(
                key=f"{key or self.kind}.name",
                got=None,
                because=f"no {self.kind} is chosen",
                fix=did_you_mean("", self.names()),
            )
        return self.get(str(name), key)


def name_of(component: type) -> str:
    """The name a component is registered under: the last part of its module's name."""
    return component.__module__.rsplit(".", 1)[-1]
