"""Everything that is asked of the settings of every run; a new check gets a line here."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

from rlmodule.core.contract import Layout
from rlmodule.run.preflight.adapters import check_lora
from rlmodule.run.preflight.batches import check_equal_counts, check_kept_groups
from rlmodule.run.preflight.groups import check_groups, check_pairs
from rlmodule.run.preflight.lengths import check_budget, check_positions
from rlmodule.run.preflight.responses import check_old_logprob, check_reward, check_staleness, check_temperature
from rlmodule.run.preflight.reward_model import check_reward_model
from rlmodule.run.preflight.stored_rollouts import check_stored
from rlmodule.run.preflight.value_model import check_critic, check_value
from rlmodule.run.settings import Settings

OF_SETTINGS: tuple[Callable[[Settings], None], ...] = (
    check_lora,
    check_groups,
    check_reward,
    check_kept_groups,
    check_pairs,
    check_reward_model,
    check_value,
    check_critic,
    check_old_logprob,
    check_stored,
    check_staleness,
    check_temperature,
)
OF_LAYOUT: tuple[Callable[[Settings, Layout], None], ...] = (check_budget, check_equal_counts)
OF_MODEL: tuple[Callable[[Settings, PreTrainedConfig], None], ...] = (check_positions,)


def check(settings: Settings, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: names both numbers and a fix.
    """
    for of_settings in OF_SETTINGS:
        of_settings(settings)
    for of_layout in OF_LAYOUT:
        of_layout(settings, layout)
    for of_model in OF_MODEL:
        of_model(settings, hf_config)
