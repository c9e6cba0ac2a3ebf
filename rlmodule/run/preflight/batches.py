"""Sizes of mini-batches and micro-batches: equal counts on every rank, groups that stay whole."""

from __future__ import annotations

from rlmodule.core.contract import Layout
from rlmodule.core.errors import ConfigError
from rlmodule.run.settings import Settings


def _size_key(settings: Settings, name: str) -> str:
    """The key that sizes the mini-batches of a model."""
    return "batching.mini_batch_size" if name == settings.leading_model else "critic.mini_batch_size"


def check_equal_counts(settings: Settings, layout: Layout) -> None:
    """Mini-batches that are dealt out in equal counts have as many samples for every data rank."""
    for name, size in settings.mini_batch_sizes.items():
        if settings.batching.equal_counts and size % layout.dp_size:
            raise ConfigError(
                key=_size_key(settings, name),
                got=size,
                because=f"equal counts on {layout.dp_size} data ranks need a multiple of {layout.dp_size}",
                fix=f"Use {_size_key(settings, name)}={-(-size // layout.dp_size) * layout.dp_size}, "
                "or batching.equal_counts=false",
            )


def check_kept_groups(settings: Settings) -> None:
    """Where groups stay whole, steps and micro-batches of a fixed size are made of whole groups."""
    batching, size = settings.batching, settings.group_size
    if not batching.keep_groups:
        return
    because = f"batching.keep_groups keeps the {size} samples of a group together"
    for name, of_step in settings.mini_batch_sizes.items():
        if of_step % size:
            raise ConfigError(
                key=_size_key(settings, name),
                got=of_step,
                because=f"{because}, and it is no multiple of {size}",
                fix=f"Use {_size_key(settings, name)}={-(-of_step // size) * size}, or batching.keep_groups=false",
            )
    per_micro_batch = batching.micro_batch_size_per_gpu
    if not batching.use_dynamic_bsz and per_micro_batch is not None and per_micro_batch < size:
        raise ConfigError(
            key="batching.micro_batch_size_per_gpu",
            got=per_micro_batch,
            because=because,
            fix=f"Use {size} or more, or batching.keep_groups=false",
        )
