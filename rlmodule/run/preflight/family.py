"""Whether and how the models of a run are computed as their own forward does, before anything is started for them."""

from __future__ import annotations

from dataclasses import replace

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.models.agreement import Agreement
from rlmodule.models.building import check_family
from rlmodule.models.description import SEPARATE, load_model_config
from rlmodule.models.value import check_value_family, value_config
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.teacher import KEY, teacher_model


def compare_families(config: RunConfig) -> list[Agreement]:
    """Compare a small random model of each kind in both ways; ranks ask again when they build the real ones.

    Raises:
        ConfigError: names the family and the reason.
    """
    critic = value_config(config.model, config.critic.path, config.critic.architecture)
    if config.model.is_reward_model:
        return [check_value_family(critic, "model")]
    found = [check_family(load_model_config(config.model), config.model)]
    if config.model.value == SEPARATE:
        found.append(check_value_family(critic, "critic"))
    if config.algorithm.teacher is not None:
        teacher = teacher_model(config)
        try:
            found.append(check_family(load_model_config(teacher), teacher))
        except ConfigError as error:
            raise ConfigError(key=KEY, got=error.got, because=error.because, fix=error.fix) from error
    return found


def check_families(config: RunConfig, layout: Layout) -> None:
    """Refuse models that cannot be computed right, or not with these micro-batches.

    Raises:
        ConfigError: names the family or the key, and the reason.
    """
    alone = next((one for one in compare_families(config) if one.rows.is_alone), None)
    if alone is None:
        return
    batching = config.batching
    for key, got, cannot in (
        ("batching.share_prompts", batching.share_prompts, True),
        ("batching.keep_groups", batching.keep_groups, layout.dp_size > 1),
    ):
        if got and cannot:
            raise ConfigError(
                key=key,
                got=got,
                because=f"the model runs {alone.note}",
                fix=f"Use {key}=false, or another model"
                + (", or one process" if key == "batching.keep_groups" else ""),
            )


def check_families_under(config: RunConfig, layout: Layout) -> None:
    """Refuse rows that are cut over processes for a model of one sample per row.

    Raises:
        ConfigError: names the key and how the model runs.
    """
    if max(layout.sp_size, layout.max_sp_size) == 1:
        return
    for found in compare_families(config):
        if layout.max_sp_size > 1 and (found.rows.is_alone or found.states):
            raise ConfigError(
                key="batching.max_sp_size",
                got=layout.max_sp_size,
                because=f"the model runs {found.note}, whole on every process"
                if found.rows.is_alone
                else f"the state of {', '.join(found.states)} runs along a row, which the plan would cut",
                fix="Use batching.max_sp_size=1",
            )
        if found.rows.is_alone:
            raise ConfigError(
                key="strategy.sp_size" if layout.cp_size == 1 else "strategy.cp_size",
                got=layout.heads_size if layout.cp_size == 1 else layout.cp_size,
                because=f"the model runs {found.note}, whole on every process",
                fix="Use strategy.sp_size=1 and strategy.cp_size=1",
            )


def with_micro_batches_for(config: RunConfig) -> RunConfig:
    """The configuration as it is, or with one sample per micro-batch where a model runs one sample per row.

    A micro-batch of several would be as many forward passes, and in a sharded model every process has to make the same
    number of them.
    """
    if not any(one.rows.is_alone for one in compare_families(config)) or config.batching.max_sp_size > 1:
        return config  # rows of several ranks are refused for such a model, see ``check_families_under``
    size = config.group_size if config.batching.keep_groups else 1
    return replace(config, batching=replace(config.batching, use_dynamic_bsz=False, micro_batch_size_per_gpu=size))
