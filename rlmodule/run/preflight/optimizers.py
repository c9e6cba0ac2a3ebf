"""Whether the chosen strategy shows an optimizer what it works on."""

from __future__ import annotations

from rlmodule.core.errors import ConfigError
from rlmodule.core.registry import name_of
from rlmodule.models.description import SEPARATE
from rlmodule.run.config import RunConfig


def check_optimizers(config: RunConfig, *, keeps_matrices: bool, moments_are_whole: bool) -> None:
    """Refuse an optimizer of whole matrices or whole weights under a strategy that has none.

    Args:
        config: of the run.
        keeps_matrices: whether the strategy leaves weights their shape and can gather them.
        moments_are_whole: whether every process holds all moments.

    Raises:
        ConfigError: names the optimizer and the strategies that can be used.
    """
    optimizers = {"optimizer": config.optimizer}
    if config.model.value == SEPARATE:
        optimizers["critic.optimizer"] = config.critic.optimizer
    for key, optimizer in optimizers.items():
        if optimizer.needs_matrices and not keeps_matrices:
            raise ConfigError(
                key=key,
                got=name_of(type(optimizer)),
                because=f"it makes each update from a whole weight matrix, and strategy={config.backend} as it is set "
                "fuses or flattens weights, or keeps their shards in host memory",
                fix="Use strategy=ddp, or strategy=fsdp2 with strategy.cpu_offload=false, or optimizer=adamw",
            )
        if optimizer.needs_whole_weights and not moments_are_whole:
            raise ConfigError(
                key=key,
                got=name_of(type(optimizer)),
                because="its scales are of blocks of a whole weight, and strategy="
                f"{config.backend} as it is set gives every process a part of it",
                fix="Use strategy=ddp or single, or optimizer=adamw",
            )
