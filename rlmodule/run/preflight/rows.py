"""Where rows come from: an environment or files, one of the two, and whether it has what the run asks for."""

from __future__ import annotations

from rlmodule.algorithm.config import DEMONSTRATIONS, PREFERENCES, ROLLOUTS
from rlmodule.core.contract import DemonstratedEnvironment
from rlmodule.core.errors import ConfigError
from rlmodule.run.config import NO_ENVIRONMENT, RunConfig


def check_rows(config: RunConfig) -> None:
    """Training rows come from an environment, from files, or are stored rollouts."""
    files, name = config.data.train_files, config.environment_name
    if config.environment is not None and files:
        raise ConfigError(
            key="data.train_files",
            got=files,
            because=f"environment={name} makes rows of its own, and rows come from one or the other",
            fix="Use data=files, which sets environment=none, or data.train_files=[]",
        )
    if config.environment is None and not files and config.data.rollouts is None:
        raise ConfigError(
            key="data.train_files",
            got=[],
            because=f"environment={NO_ENVIRONMENT} makes no rows, so they come from files",
            fix="Use data=files data.train_files=[FILE], or environment=sort",
        )


def check_order(config: RunConfig) -> None:
    """What orders rows is for rows of files, and a pass has a length where every iteration takes as many rows."""
    if config.data.curriculum and config.dataset not in (ROLLOUTS, DEMONSTRATIONS, PREFERENCES):
        raise ConfigError(
            key="data.curriculum",
            got=config.data.curriculum,
            because="stored rollouts come group by group, in any order",
            fix="Leave it out",
        )
    if config.data.curriculum and config.environment is not None and not config.algorithm.is_sampled:
        raise ConfigError(
            key="data.curriculum",
            got=config.data.curriculum,
            because=f"what environment={config.environment_name} demonstrates has no columns",
            fix="Leave it out, or take rows from files",
        )
    if config.trainer.passes is not None and config.algorithm.filter_groups.enable:
        raise ConfigError(
            key="trainer.passes",
            got=f"{config.trainer.passes:g}",
            because="algorithm.filter_groups takes as many rows as it needs, so a pass has no number of iterations",
            fix="Use trainer.max_epochs, or algorithm.filter_groups.enable=false",
        )


def check_demonstrations(config: RunConfig) -> None:
    """Responses that the policy does not sample are shown by an environment that can, or come from files."""
    environment = config.environment
    if environment is None or isinstance(environment, DemonstratedEnvironment):
        return
    because, given = "it shows no responses to learn from", "files: data=files data.train_files=[FILE]"
    if not config.algorithm.is_sampled:
        raise ConfigError(
            key="environment",
            got=config.environment_name,
            because=f"{because}, and algorithm.source={config.algorithm.source} needs some",
            fix=f"Use {given}, or algorithm.source=rollouts",
        )
    if config.needs_warm_start:
        raise ConfigError(
            key="warm_start.steps",
            got=config.warm_start.steps,
            because=f"environment={config.environment_name} starts a random model with nothing: {because}",
            fix="Use warm_start=none, or model.path=FOLDER",
        )
