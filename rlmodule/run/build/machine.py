"""What a run happens on: kind of device and number of processes, as asked for and as there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlmodule.core.errors import ConfigError
from rlmodule.run.config import TrainerConfig
from rlmodule.run.launchers.local import launched_from_outside


@dataclass(frozen=True)
class Machine:
    """This machine and its peers.

    Args:
        trainer: what is asked for.
    """

    trainer: TrainerConfig

    @property
    def device(self) -> str:
        """Kind of device: cpu, cuda, ...

        Raises:
            ConfigError: there is none of the kind asked for.
        """
        asked = self.trainer.accelerator
        wanted = {"gpu": "cuda"}.get(asked, asked)
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        here = "cpu" if found is None else found.type
        if wanted not in ("auto", "cpu", here):
            raise ConfigError(
                key="trainer.accelerator",
                got=asked,
                because=f"this machine has {here} only",
                fix="Use trainer.accelerator=auto",
            )
        return here if wanted == "auto" else wanted

    @property
    def num_processes(self) -> int:
        """Processes on this machine.

        Raises:
            ConfigError: more are asked for than there are devices.
        """
        devices = self.trainer.devices
        here = torch.accelerator.device_count() if self.device != "cpu" else None
        if devices == "auto":
            return here or 1
        if here is not None and int(devices) > here:
            raise ConfigError(
                key="trainer.devices",
                got=devices,
                because=f"this machine has {here} {self.device} devices",
                fix=f"Use trainer.devices={here}",
            )
        return int(devices)

    @property
    def world_size(self) -> int:
        """Processes of the run over all machines."""
        return self.num_processes * self.trainer.num_nodes

    @property
    def needs_supervisor(self) -> bool:
        """Whether the ranks of this run have yet to be started."""
        return self.num_processes > 1 and not launched_from_outside()

    def describe(self) -> str:
        """For the run's plan."""
        return f"{self.world_size} {self.device} process{'es' if self.world_size > 1 else ''}"
