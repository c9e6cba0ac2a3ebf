"""Strategies that need a package which only ``make test-backends`` installs, and the mark of their tests."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

from strategies.parts.foreign_imports import import_part

PACKAGES: Mapping[str, str] = {  # strategy -> distribution, as pip knows it
    "automodel": "nemo-automodel",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "veomni": "veomni",
}

# strategy -> part of it that imports its package where a model is built
PARTS = {"automodel": "automodel_wrapping", "torchtitan": "torchtitan_blocks", "veomni": "veomni_wrapping"}


def is_installed(package: str) -> bool:
    """Whether pip has installed it; imports nothing."""
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def import_once(strategy: str) -> None:
    """Import the project around which it is, so that forked ranks do not each spend ten seconds on that."""
    module: Any = importlib.import_module(f"strategies.{strategy}")
    if strategy in PARTS:
        import_part(
            PARTS[strategy], needs=getattr(module, "MISSING", {}), environment=getattr(module, "ENVIRONMENT", {})
        )
    elif strategy == "deepspeed":
        module.load_deepspeed("cpu")
        # An optimizer nobody asked for, which the engine looks at; its import brings in torch's compiler.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def needing(strategy: str) -> pytest.MarkDecorator:
    """The mark of a test that runs ``strategy``, one of ``PACKAGES``."""
    return pytest.mark.backends(PACKAGES[strategy])


def marked(strategies: Iterable[str]) -> list[Any]:
    """Parameters of a test that runs each strategy; those that need a package carry its mark."""
    return [pytest.param(name, marks=needing(name)) if name in PACKAGES else name for name in strategies]
