"""Sizes of mini-batches and micro-batches: equal counts on every rank, groups that stay whole."""

from __future__ import annotations

from rlmodule.core.errors import ConfigError
from rlmodule.core.layout import Layout
from rlmodule.run.config import RunConfig


def _size_key(config: RunConfig, name: str) -> str:
    """The key that sizes the mini-batches of a model."""
    return "batching.mini_batch_size" if name == config.trained_model else "critic.mini_batch_size"


def check_equal_counts(config: RunConfig, layout: Layout) -> None:
    """Mini-batches that are dealt out in equal counts have as many samples for every data rank."""
    for name, size in config.mini_batch_sizes.items():
        if config.batching.equal_counts and size % layout.dp_size:
            raise ConfigError(
                key=_size_key(config, name),
                got=size,
                because=f"equal counts on {layout.dp_size} data ranks need a multiple of {layout.dp_size}",
                fix=f"Use {_size_key(config, name)}={-(-size // layout.dp_size) * layout.dp_size}, "
                "or batching.equal_counts=false",
            )


def check_kept_groups(config: RunConfig) -> None:
    """Where groups stay whole, steps and micro-batches of a fixed size are made of whole groups."""
    batching, size = config.batching, config.group_size
    if not batching.keep_groups:
        return
    because = f"batching.keep_groups keeps the {size} samples of a group together"
    for name, of_step in config.mini_batch_sizes.items():
        if of_step % size:
            raise ConfigError(
                key=_size_key(config, name),
                got=of_step,
                because=f"{because}, and it is no multiple of {size}",
                fix=f"Use {_size_key(config, name)}={-(-of_step // size) * size}, or batching.keep_groups=false",
            )
    per_micro_batch = batching.micro_batch_size_per_gpu
    if not batching.use_dynamic_bsz and per_micro_batch is not None and per_micro_batch < size:
        raise ConfigError(
            key="batching.micro_batch_size_per_gpu",
            got=per_micro_batch,
            because=because,
            fix=f"Use {size} or more, or batching.keep_groups=false",
        )
