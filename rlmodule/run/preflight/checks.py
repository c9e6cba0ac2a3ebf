"""Everything that is asked of the settings of every run; a new check gets a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedConfig

from rlmodule.core.layout import Layout
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.adapters import check_lora
from rlmodule.run.preflight.batches import check_equal_counts, check_kept_groups
from rlmodule.run.preflight.groups import check_components, check_groups, check_pairs
from rlmodule.run.preflight.lengths import check_budget, check_positions
from rlmodule.run.preflight.responses import (
    check_ahead,
    check_corrected_pairs,
    check_reward,
    check_rollout_weight,
    check_sampler_logprob,
    check_staleness,
    check_temperature,
)
from rlmodule.run.preflight.reward_model import check_reward_model
from rlmodule.run.preflight.rows import check_demonstrations, check_order, check_rows
from rlmodule.run.preflight.shape import check_shape
from rlmodule.run.preflight.stored_rollouts import check_stored
from rlmodule.run.preflight.value_model import check_critic, check_value

OF_SETTINGS: tuple[Callable[[RunConfig], None], ...] = (
    check_rows,
    check_demonstrations,
    check_order,
    check_lora,
    check_groups,
    check_components,
    check_reward,
    check_kept_groups,
    check_pairs,
    check_reward_model,
    check_value,
    check_critic,
    check_corrected_pairs,
    check_sampler_logprob,
    check_rollout_weight,
    check_stored,
    check_staleness,
    check_ahead,
    check_temperature,
)
OF_LAYOUT: tuple[Callable[[RunConfig, Layout], None], ...] = (check_budget, check_equal_counts)
OF_MODEL: tuple[Callable[[RunConfig, PreTrainedConfig], None], ...] = (check_shape, check_positions)


def all_checks(config: RunConfig, hf_config: PreTrainedConfig, layout: Layout) -> list[Callable[[], None]]:
    """Every check of this run, to be called one by one."""
    return [
        *(partial(of_settings, config) for of_settings in OF_SETTINGS),
        *(partial(of_layout, config, layout) for of_layout in OF_LAYOUT),
        *(partial(of_model, config, hf_config) for of_model in OF_MODEL),
    ]


def check(config: RunConfig, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: names both numbers and a fix.
    """
    for one in all_checks(config, hf_config, layout):
        one()
