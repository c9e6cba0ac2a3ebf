"""Which versions of an optional package a backend was written for; its inner names change between them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from rlmodule.core.errors import ConfigError


def check_version(package: str, supported: Collection[str], backend: str) -> None:
    """Check the installed version of a package, before anything of it is imported.

    Raises:
        ConfigError: it is another one.
        ModuleNotFoundError: the package is not installed.
    """
    installed = version(package)
    if installed not in supported:
        wanted = ", ".join(sorted(supported))
        raise ConfigError(
            key="strategy",
            got=backend,
            because=f"{package} {installed} is installed, and the strategy was written for {wanted} alone",
            fix=f"pip install {package}=={wanted.split(', ')[-1]}, or use strategy=fsdp2",
        )
