"""Samples that are too long for a micro-batch or for the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.models.description import positions_in_words, positions_of
from rlmodule.run.config import RunConfig


def check_budget(config: RunConfig, layout: Layout) -> None:
    """Nothing longer than a micro-batch may come up in the middle of a run."""
    batching, data = config.batching, config.data
    if not batching.use_dynamic_bsz or config.dataset != ROLLOUTS:
        return  # samples are there already, see check_lengths
    ranks = layout.sp_size * layout.max_sp_size
    budget = batching.max_token_len_per_gpu * ranks
    together = config.group_size if batching.keep_groups else 1  # samples that share a micro-batch
    of_prompts, behind = together * data.max_prompt_length, ""
    if batching.share_prompts:
        of_prompts = max(data.max_prompt_length, together)  # a prompt of one token is not shared
        behind = " behind one prompt"
    needed = of_prompts + together * config.sampling.max_response_length
    if needed > budget:
        raise ConfigError(
            key="batching.max_token_len_per_gpu",
            got=batching.max_token_len_per_gpu,
            because=f"a sample can have data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{config.sampling.max_response_length} = {config.longest_sample} tokens, "
            + (f"batching.keep_groups keeps {together} of them together{behind}, " if together > 1 else "")
            + f"and one micro-batch holds {budget}",
            fix=f"Use batching.max_token_len_per_gpu={-(-needed // ranks)} or more, or lower either length",
        )


def check_lengths(rows: Iterable[tuple[str, Sequence[int]]], config: RunConfig, layout: Layout) -> None:
    """As ``check_budget`` for samples that are there already, all of a row's together.

    Args:
        rows: (words for the row, tokens of each of its samples).
        config: the budget.
        layout: ranks that share a row.

    Raises:
        ConfigError: names the first row that is too long.
    """
    batching = config.batching
    ranks = layout.sp_size * layout.max_sp_size
    budget = batching.max_token_len_per_gpu * ranks
    for name, lengths in rows if batching.use_dynamic_bsz else ():
        tokens = sum(lengths) if batching.keep_groups else max(lengths)
        if tokens > budget:
            raise ConfigError(
                key="batching.max_token_len_per_gpu",
                got=batching.max_token_len_per_gpu,
                because=f"{name} has {tokens} tokens"
                + (f" in {len(lengths)} samples that stay together" if batching.keep_groups else "")
                + f", and one micro-batch holds {budget}",
                fix=f"Use batching.max_token_len_per_gpu={-(-tokens // ranks)} or more",
            )


def check_positions(config: RunConfig, hf_config: PreTrainedConfig) -> None:
    """The longest sample that settings allow has a position for every token.

    Without a reward function nothing is sampled, and the rows are checked one by one, see ``check_measured``.
    """
    limit = None if config.reward is None else positions_of(hf_config)
    behind = int(config.reads_behind_the_end)
    in_words = ", advantage.bootstrap_truncated=true reads the value behind them at one position more" * behind
    if limit is not None and config.longest_sample + behind > limit:
        raise ConfigError(
            key="rollout.max_response_length",
            got=config.sampling.max_response_length,
            because=f"with data.max_prompt_length={config.data.max_prompt_length} a sample can have "
            f"{config.longest_sample} tokens{in_words}, and the model has {positions_in_words(hf_config)}",
            fix=f"Lower one of the two so that they add up to {limit - behind} at most",
        )
