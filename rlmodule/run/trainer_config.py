"""The section ``trainer`` of the configuration: how long a run is, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rlmodule.core.config import at_least, at_most, convert, more_than, one_of
from rlmodule.core.errors import ConfigError


@dataclass(frozen=True)
class TrainerConfig:
    """How long, and on what."""

    max_epochs: int = 70  # iterations; one iteration (rollouts, then training on them) is one epoch
    passes: float | None = None  # passes over the training rows, in place of max_epochs; the last iteration is shorter
    devices: str = "1"  # processes on this machine; auto for every accelerator there is
    num_nodes: int = 1  # machines
    accelerator: str = "auto"  # auto, cpu, gpu, ...
    num_threads: int | None = None  # CPU threads of one process
    max_skipped_in_a_row: int = 10  # stop after that many steps in a row without a finite gradient norm
    timeout: float = 10.0  # minutes that a process may show no sign of life before the run is ended
    device_memory_gb: float | None = None  # memory of a device for plans and budgets, 1e9 bytes; null: as this machine

    def __post_init__(self) -> None:
        if self.device_memory_gb is not None:
            more_than("device_memory_gb", self.device_memory_gb, 0)
        at_least("max_epochs", self.max_epochs, 1)
        at_least("num_nodes", self.num_nodes, 1)
        at_least("max_skipped_in_a_row", self.max_skipped_in_a_row, 1)
        more_than("timeout", self.timeout, 0)
        if self.passes is not None:
            more_than("passes", self.passes, 0)
        one_of("accelerator", self.accelerator, ("auto", "cpu", "gpu", "cuda", "mps", "npu", "xpu"))
        if self.num_threads is not None:
            at_least("num_threads", self.num_threads, 1)
            at_most("num_threads", self.num_threads, 1024)
        if self.devices != "auto" and not (self.devices.isdecimal() and int(self.devices) >= 1):
            raise ConfigError(
                key="devices",
                got=self.devices,
                because="the number of processes must be a whole number of at least 1, or auto",
                fix="Use trainer.devices=1",
            )


def read_trainer(node: DictConfig | Mapping[str, Any]) -> TrainerConfig:
    """The section, with one of the two keys that say how long a run is.

    Raises:
        ConfigError: a value is wrong, or both keys are there.
    """
    trainer = convert(TrainerConfig, node, "trainer")
    if trainer.passes is not None and trainer.max_epochs != TrainerConfig.max_epochs:
        raise ConfigError(
            key="trainer.passes",
            got=f"{trainer.passes:g}",
            because=f"trainer.max_epochs={trainer.max_epochs} says how long the run is as well",
            fix=f"Leave one of the two out; trainer.max_epochs={TrainerConfig.max_epochs} counts as left out",
        )
    return trainer
