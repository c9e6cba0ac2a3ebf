"""What a configuration leaves to the model and to the machine, filled in: a new configuration, computed once.

Leaves out what the rows of the data decide (``Run.counted``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rlmodule.core.errors import ConfigError
from rlmodule.models.packaged import folder_of, is_packaged
from rlmodule.models.published import describe_model
from rlmodule.models.size import size_of
from rlmodule.run.build.device_memory import device_memory
from rlmodule.run.config import RunConfig
from rlmodule.run.learning_rate import with_learning_rates
from rlmodule.run.planning.budget import fitting_budget
from rlmodule.run.planning.machine import PlannedMachine
from rlmodule.run.planning.plan import Plan


def resolved(config: RunConfig, plan_of: Callable[[RunConfig], Plan]) -> RunConfig:
    """The configuration with the folder of a packaged model, a number for every learning rate, and a token budget.

    Args:
        config: as configured.
        plan_of: what a run of a configuration will need; asked where the budget is ``auto``.

    Raises:
        ConfigError: not even one sample fits.
    """
    config = _in_its_folder(config)
    config = with_learning_rates(config, lambda: size_of(describe_model(config.model).config).total)
    if not config.fits_budget:
        return config
    return with_budget(config, fitting_budget(plan_of(config), device_memory(PlannedMachine(config.trainer))))


def with_budget(config: RunConfig, budget: int) -> RunConfig:
    """The configuration with so many tokens per micro-batch."""
    batching = replace(config.batching, max_token_len_per_gpu=budget)
    return replace(config, batching=batching, fits_budget=False)


def packaged_path(config: RunConfig) -> str | None:
    """``model.path`` where it names a package that a model comes in; None elsewhere."""
    return config.model.path if is_packaged(config.model.path) else None


def _in_its_folder(config: RunConfig) -> RunConfig:
    """Let ``model.path`` name the folder of a model that comes in a package."""
    path = packaged_path(config)
    if path is None:
        return config
    with suppress(ConfigError):  # not installed: a plan needs no files, and ``Run.unpack_model`` says so
        return replace(config, model=replace(config.model, path=str(folder_of(path))))
    return config
