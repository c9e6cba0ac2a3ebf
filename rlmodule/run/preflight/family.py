"""Whether the models of a run are computed as their own forward does, before anything is started for them."""

from __future__ import annotations

from rlmodule.core.errors import ConfigError
from rlmodule.models.building import check_family
from rlmodule.models.description import SEPARATE, load_model_config
from rlmodule.models.value import check_value_family, value_config
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.teacher import KEY, teacher_model


def check_families(config: RunConfig) -> None:
    """Compare a small random model of each kind in both ways; ranks ask again when they build the real ones.

    Raises:
        ConfigError: names the family and the reason.
    """
    critic = value_config(config.model, config.critic.path, config.critic.architecture)
    if config.model.is_reward_model:
        check_value_family(critic, "model")
        return
    check_family(load_model_config(config.model), config.model)
    if config.model.value == SEPARATE:
        check_value_family(critic, "critic")
    if config.algorithm.teacher is not None:
        teacher = teacher_model(config)
        try:
            check_family(load_model_config(teacher), teacher)
        except ConfigError as error:
            raise ConfigError(key=KEY, got=error.got, because=error.because, fix=error.fix) from error
