"""``command=train``: check, save what is run, make starting weights where a random model needs them, then fit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.run.build.distributed import on_rank_zero
from rlmodule.run.launchers.parts.place import launched_from_outside
from rlmodule.run.preflight.responses import check_reward_server
from rlmodule.run.run import Run
from rlmodule.run.warm_start import WarmStart


@COMMANDS.register
@dataclass(frozen=True)
class Train(Command):
    """Train the models of a run; without a name the command is this one."""

    starts_ranks: ClassVar[bool] = True

    def __call__(self, invocation: Invocation) -> int:
        """Train on as many processes as the run asks for."""
        run = invocation.run.with_other_ranks()
        with ExitStack() as held:
            on_rank_zero(lambda: held.enter_context(run.locked()))
            run.check()
            on_rank_zero(run.config.rollout.check_here)
            on_rank_zero(lambda: check_reward_server(run.config))
            run.save_config(invocation.settled_config(run), invocation.provenance)
            make_starting_weights(run, invocation)
            on_rank_zero(WarmStart(run).note)
            if run.needs_launcher:
                return invocation.start_ranks(run.run_dir.root, run.machine.num_processes)
            fit(run)
        return 0

    def on_rank(self, run: Run) -> None:
        """Train one rank's part."""
        fit(run)


def make_starting_weights(run: Run, invocation: Invocation) -> None:
    """Make the starting weights that the run needs and does not have; every rank calls it."""
    warm_start = WarmStart(run)
    if not warm_start.is_due:
        return
    if not launched_from_outside():
        warm_start.fit()
        return
    if run.is_rank_zero:  # the warm start has one process, and this one has peers
        invocation.make_starting_weights(run.run_dir.root)
    dist.barrier()


def fit(run: Run) -> None:
    """Train one rank's part of a run whose starting weights are there."""
    check_reward_server(run.config)
    WarmStart(run).started().fit()
