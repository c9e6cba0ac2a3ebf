"""Which releases of another project a strategy was run with: it calls parts of them that change without notice.

A strategy calls ``require_release`` when it is imported, and imports the project itself where it builds a model.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rlmodule.core.errors import ConfigError, DependencyError


def require_release(package: str, *tried: str, strategy: str, apart: bool = False) -> None:
    """Refuse a release that was not run.

    Args:
        package: as pip knows it.
        tried: releases that were run.
        strategy: name of the strategy, which is the name of its extra, too.
        apart: the extra holds what the package needs, not the package: its requirements contradict this project's.

    Raises:
        DependencyError: the package is not installed.
        ConfigError: another release of it is.
    """
    alone = f"pip install --no-deps {package}=={tried[-1]}"
    try:
        found = version(package)
    except PackageNotFoundError:
        then = alone if apart else ""
        raise DependencyError(package=package, needed_by=f"strategy={strategy}", extra=strategy, then=then) from None
    if found not in tried:
        raise ConfigError(
            key="strategy",
            got=strategy,
            because=f"{package} {found} is installed, and this strategy calls parts of it that differ between "
            f"releases; it was run with {' and '.join(tried)} alone",
            fix=f"Run {alone}, or use strategy=fsdp2",
        )
