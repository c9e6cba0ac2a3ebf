"""What a run happens on: kind of device and number of processes, as asked for and as there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from rlmodule.core.devices import detect_device, import_package_of
from rlmodule.core.errors import ConfigError
from rlmodule.run.trainer_config import TrainerConfig

CPU_PROCESSES = 64  # a laptop may try the layout of a large machine; far more would take its whole memory


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
        import_package_of(wanted)
        here = detect_device()
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
            ConfigError: more are asked for than there are devices, or than a CPU can be shared among.
        """
        devices, on_cpu = self.trainer.devices, self.device == "cpu"
        if devices == "auto":
            return 1 if on_cpu else torch.accelerator.device_count()
        cores = os.cpu_count() or 1
        most = max(CPU_PROCESSES, cores) if on_cpu else torch.accelerator.device_count()
        if int(devices) > most:
            here = f"{cores} CPU cores, for {most} processes at most" if on_cpu else f"{most} {self.device} devices"
            raise ConfigError(
                key="trainer.devices",
                got=devices,
                because=f"this machine has {here}",
                fix=f"Use trainer.devices={most if not on_cpu else min(most, cores)}",
            )
        return int(devices)

    @property
    def is_alone(self) -> bool:
        """Whether one process is asked for, or is all that ``auto`` finds here."""
        devices = self.trainer.devices
        return self.trainer.num_nodes == 1 and (self.num_processes if devices == "auto" else int(devices)) == 1

    @property
    def world_size(self) -> int:
        """Processes of the run over all machines."""
        return self.num_processes * self.trainer.num_nodes

    def describe(self) -> str:
        """For the run's plan."""
        return f"{self.world_size} {self.device} process{'es' if self.world_size > 1 else ''}"
