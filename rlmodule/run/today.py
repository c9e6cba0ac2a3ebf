"""The day that chat templates write as that of today: the one on which a run began, also where it goes on later.

Templates ask for it (Llama 3.2, SmolLM3, gpt-oss). Asked of the clock, they would give a run other prompts after
midnight, and one that is resumed tomorrow.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import date

from omegaconf import OmegaConf

from rlmodule.core.errors import ConfigError
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.distributed import smallest_of_ranks
from rlmodule.run.config import RunConfig
from rlmodule.run.launchers.parts.place import started_by_launcher
from rlmodule.run.saved.saved_settings import read_saved_config


def with_day(config: RunConfig, run_dir: RunDirectory) -> RunConfig:
    """The configuration with a day: its own, else that of the run that goes on in the directory, else today."""
    if config.data.date is not None:
        return config
    goes_on = config.general.resume is not None or started_by_launcher()
    return _on(config, (_noted(run_dir) if goes_on else None) or today())


def on_one_day(config: RunConfig) -> RunConfig:
    """The same day on every rank, whatever the clocks of their machines say."""
    assert config.data.date is not None, "a run has a day"
    return _on(config, date.fromordinal(smallest_of_ranks(date.fromisoformat(config.data.date).toordinal())))


def today() -> date:
    """By the clock of this machine."""
    return date.today()


def _on(config: RunConfig, day: date) -> RunConfig:
    return replace(config, data=replace(config.data, date=day.isoformat()))


def _noted(run_dir: RunDirectory) -> date | None:
    """What the saved configuration says; None where it says nothing, or is of an earlier version."""
    with suppress(ConfigError, ValueError, TypeError):
        return date.fromisoformat(OmegaConf.select(read_saved_config(run_dir.root), "data.date"))
    return None
