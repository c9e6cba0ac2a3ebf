"""More processes or threads than a machine can hold are refused before one is started."""

from __future__ import annotations

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.run.build.machine import Machine
from rlmodule.run.trainer_config import TrainerConfig


@pytest.mark.parametrize("devices", ["1", "4", "64"])
def test_a_cpu_is_shared_among_a_few_processes(devices: str) -> None:
    assert Machine(TrainerConfig(devices=devices, accelerator="cpu")).num_processes == int(devices)


@pytest.mark.parametrize("devices", ["100000", "1000000"])
def test_processes_that_would_take_the_whole_memory_are_refused(devices: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.devices={devices}: this machine has .* Use trainer\.devices="):
        _ = Machine(TrainerConfig(devices=devices, accelerator="cpu")).num_processes


def test_threads_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads=100000: must be at most 1024"):
        TrainerConfig(num_threads=100_000)
