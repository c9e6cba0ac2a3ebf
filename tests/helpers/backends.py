"""Strategies that need a package which only ``make test-backends`` installs, and the mark of their tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

PACKAGES: Mapping[str, str] = {  # strategy -> distribution, as pip knows it
    "automodel": "nemo-automodel",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "veomni": "veomni",
}


def is_installed(package: str) -> bool:
    """Whether pip has installed it; imports nothing."""
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def needing(strategy: str) -> pytest.MarkDecorator:
    """The mark of a test that runs ``strategy``, one of ``PACKAGES``."""
    return pytest.mark.backends(PACKAGES[strategy])


def marked(strategies: Iterable[str]) -> list[Any]:
    """Parameters of a test that runs each strategy; those that need a package carry its mark."""
    return [pytest.param(name, marks=needing(name)) if name in PACKAGES else name for name in strategies]
