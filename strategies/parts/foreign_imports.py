"""Imports of other training projects that leave what is shared as it was.

Some of them register attentions with transformers, replace functions of it or widen its lists when they are imported,
and all speak of kernels that are not there. Inside of ``imports_of`` they may; afterwards transformers, warnings and
logging are as before, so a run under another strategy in the same process is not touched.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TABLES: tuple[dict[str, Any], ...] = (
    ALL_ATTENTION_FUNCTIONS._global_mapping,
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
    LOSS_MAPPING,
)
EMPTY: Mapping[str, Any] = {}


@contextmanager
def imports_of(*, needs: Mapping[str, Any] = EMPTY, environment: Mapping[str, str] = EMPTY) -> Iterator[None]:
    """Import another project inside.

    Args:
        needs: ``module.name`` of what it imports and this transformers does not have -> what is there meanwhile.
        environment: variables that it reads while it is imported.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment_of(environment))
        stack.enter_context(_transformers_kept())
        stack.enter_context(_names_in_place(needs))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_logging_kept())
        yield


def import_part(name: str, *, needs: Mapping[str, Any] = EMPTY, environment: Mapping[str, str] = EMPTY) -> ModuleType:
    """``parts/NAME.py``, and with it another project; arguments as of ``imports_of``."""
    with imports_of(needs=needs, environment=environment):
        return importlib.import_module(f"strategies.parts.{name}")


@contextmanager
def _transformers_kept() -> Iterator[None]:
    """Afterwards its tables have no other entries, and its modules no other functions, classes or lists."""
    tables = [dict(table) for table in TABLES]
    modules = {module: dict(vars(module)) for module in _modules_of("transformers")}
    try:
        yield
    finally:
        for table, before in zip(TABLES, tables, strict=True):
            table.clear()
            table.update(before)
        for module, names in modules.items():
            for name, value in names.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


def _modules_of(package: str) -> list[ModuleType]:
    inside = (module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package}."))
    return [module for module in inside if isinstance(module, ModuleType)]


@contextmanager
def _names_in_place(names: Mapping[str, Any]) -> Iterator[None]:
    """Each ``module.name`` has its value inside, unless it had one before."""
    added: list[tuple[ModuleType, str]] = []
    for path, value in names.items():
        place, _, name = path.rpartition(".")
        module = importlib.import_module(place)
        if not hasattr(module, name):
            setattr(module, name, value)
            added.append((module, name))
    try:
        yield
    finally:
        for module, name in added:
            delattr(module, name)


@contextmanager
def _environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Silent inside; level and handlers of the root logger stay, and what all loggers can do."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    level, handlers, methods = root.level, list(root.handlers), dict(vars(logging.Logger))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for name, method in methods.items():
            if vars(logging.Logger).get(name) is not method:
                setattr(logging.Logger, name, method)
        root.setLevel(level)
        root.handlers[:] = handlers
