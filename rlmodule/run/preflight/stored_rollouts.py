"""Responses that were sampled earlier: what a run may ask of them, and whether the files have it."""

from __future__ import annotations

from transformers import PreTrainedConfig

from rlmodule.core.errors import ConfigError, DataError
from rlmodule.core.layout import Layout
from rlmodule.data.rollouts import RolloutTable
from rlmodule.models.description import positions_of
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.lengths import check_lengths


def check_stored(config: RunConfig) -> None:
    """What stored rollouts cannot give, whatever stands in the file."""
    if config.data.rollouts is None:
        return
    for name, is_on in (
        (f"algorithm.source={config.algorithm.source}", not config.algorithm.is_sampled),
        ("batching.keep_groups, which counts on groups of one size", config.batching.keep_groups),
        ("a greedy answer to every prompt", config.advantage_reads("baseline")),
    ):
        if is_on:
            raise ConfigError(
                key="data.rollouts",
                got=config.data.rollouts,
                because=f"stored rollouts do not go with {name}",
                fix="Use data.rollouts=null",
            )


def check_rollouts(table: RolloutTable, config: RunConfig, hf_config: PreTrainedConfig, layout: Layout) -> None:
    """Refuse stored responses that lack what the objective needs, or do not fit.

    Raises:
        RLModuleError: names the first row.
    """
    check_lengths(((table.location(row), (length,)) for row, length in enumerate(table.lengths)), config, layout)
    _check_positions(table, positions_of(hf_config), behind=int(config.reads_behind_the_end))
    _check_groups(table, config)
    _check_logprobs(table, config)


def _check_positions(table: RolloutTable, limit: int | None, *, behind: int) -> None:
    in_words = ", advantage.bootstrap_truncated=true reads the value behind them at one position more" * behind
    for row, length in enumerate(table.lengths):
        if limit is not None and length + behind > limit:
            raise DataError(
                location=table.location(row),
                because=f"prompt and response have {length} tokens{in_words}, and the model has {limit} positions",
                fix="Delete the row",
            )


def _check_groups(table: RolloutTable, config: RunConfig) -> None:
    if config.advantage_reads("group") and table.largest == 1:
        raise DataError(
            location=table.name,
            because=f"every group has one response, and {type(config.advantage).__name__} compares the responses of "
            "a group",
            fix="Write the same group_id into the rows of a group, or use advantage=reinforce_pp",
        )


def _check_logprobs(table: RolloutTable, config: RunConfig) -> None:
    """Those that are read must be there, and of the whole policy where they stand for the old policy's."""
    algorithm = config.algorithm
    are_read = algorithm.compares_rollouts or algorithm.old_logprob == "rollout"
    if are_read and table.without_logprobs is not None:
        raise DataError(
            location=table.location(table.without_logprobs),
            because="the row has no log-probabilities, and algorithm.old_logprob=rollout, "
            "algorithm.rollout_correction and algorithm.rollout_rejection read them",
            fix="Use algorithm.old_logprob=recompute algorithm.rollout_correction.mode=none "
            "algorithm.rollout_rejection.token_estimator=none algorithm.rollout_rejection.sequence_estimator=none",
        )
    if "teacher_logprob" in config.loss.needs and algorithm.teacher is None and table.without_teacher is not None:
        raise DataError(
            location=table.location(table.without_teacher),
            because=f"the row has no teacher_logprobs, which {type(config.loss).__name__} learns from",
            fix="Use algorithm.teacher=FOLDER",
        )
    is_old, weighs = algorithm.uses_rollout_logprob, algorithm.learns_from_comparisons
    for sampling, row in table.samplings.items():
        if sampling is None or not (is_old or weighs):
            continue
        # Only compared with the policy's, they may be of another temperature: a whole policy's they have to be.
        temperature = config.sampling.temperature if is_old else sampling.temperature
        if not sampling.is_policy_at(temperature):
            raise DataError(
                location=table.location(row),
                because=f"it was drawn with {sampling}, so its log-probabilities are not those of a whole policy at "
                f"rollout.temperature={temperature}",
                fix=f"Use algorithm.{'old_logprob=recompute' if is_old else f'{next(iter(weighs))}=none'}",
            )
