"""``command=plan``: what a run will need and what is wrong with it, without weights, network or accelerator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.config import at_least, at_most, more_than
from rlmodule.core.errors import ConfigError
from rlmodule.core.memory import ACCELERATOR_SHARE
from rlmodule.run.build.device_memory import device_memory
from rlmodule.run.launchers.parts.supervision import USER_ERROR
from rlmodule.run.planning.machine import PlannedMachine
from rlmodule.run.planning.page import Assumed, as_data, show
from rlmodule.run.planning.work import Lengths
from rlmodule.run.run import Run


@COMMANDS.register
@dataclass(frozen=True)
class PlanRun(Command):
    """Say what the run will need: memory, time, traffic, problems; nothing is loaded or fetched."""

    has_run_dir: ClassVar[bool] = False

    json: str | None = None  # file for the plan as JSON; null for none
    mean_prompt_length: float | None = None  # expected tokens of a prompt; null for data.max_prompt_length
    mean_response_length: float | None = None  # expected tokens of a response; null for rollout.max_response_length
    peak_tflops: float = 989.0  # dense TFLOP/s of one device: H100 and H200 989, A100 312, in bfloat16
    mfu_low: float = 0.2  # lowest share of it that is expected to be used
    mfu_high: float = 0.45  # highest share

    def __post_init__(self) -> None:
        for name in ("mean_prompt_length", "mean_response_length"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        more_than("peak_tflops", self.peak_tflops, 0)
        more_than("mfu_low", self.mfu_low, 0)
        at_most("mfu_high", self.mfu_high, 1)
        if self.mfu_low > self.mfu_high:
            raise ConfigError(
                key="mfu_low",
                got=self.mfu_low,
                because=f"it is above mfu_high={self.mfu_high}",
                fix=f"Use mfu_low={self.mfu_high} or less",
            )

    def __call__(self, invocation: Invocation) -> int:
        """Print the page; 2 where the run would be refused."""
        run = invocation.run
        self._check_json()
        plan = run.plan_with(self._lengths(run))
        data = as_data(plan, self._assumed(run))
        show(data, Console(highlight=False, soft_wrap=False))
        if self.json is not None:
            Path(self.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        return USER_ERROR if data["problems"] else 0

    def _check_json(self) -> None:
        """Refuse a file that cannot be written, before anything is computed."""
        if self.json is None or (Path(self.json).parent.is_dir() and not Path(self.json).is_dir()):
            return
        raise ConfigError(
            key="command.json",
            got=self.json,
            because="it is a folder, or lies in one that does not exist",
            fix="Give the path of a file in a folder that exists",
        )

    def _lengths(self, run: Run) -> Lengths:
        config = run.config
        return Lengths(
            self.mean_prompt_length or config.data.max_prompt_length,
            self.mean_response_length or config.sampling.max_response_length,
        )

    def _assumed(self, run: Run) -> Assumed:
        machine = PlannedMachine(run.config.trainer)
        given = machine.trainer.device_memory_gb
        where = (
            f"{ACCELERATOR_SHARE:.0%} of trainer.device_memory_gb={given:g}"
            if given is not None
            else f"what this machine's {machine.device} has for a process"
        )
        return Assumed(device_memory(machine), where, self.peak_tflops, (self.mfu_low, self.mfu_high))
