"""``command=parity``: the same steps under every layout, and how far each is from one process."""

from __future__ import annotations

from dataclasses import dataclass

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.errors import ConfigError
from rlmodule.parity.config import ParityConfig
from rlmodule.parity.report import check_parity
from rlmodule.run.launchers.parts.place import launched_from_outside
from rlmodule.run.launchers.parts.supervision import DIFFERENT_NUMBERS


@COMMANDS.register
@dataclass(frozen=True)
class Parity(ParityConfig, Command):
    """Show on this machine, for this model, that every layout gives the same numbers."""

    def __call__(self, invocation: Invocation) -> int:
        """Compare the layouts; 1 where one gives other numbers.

        Raises:
            ConfigError: started by torchrun or srun, or on stored rollouts.
        """
        run = invocation.run
        if launched_from_outside():
            raise ConfigError(
                key="command",
                got="parity",
                because="it starts processes of its own, and torchrun or srun has started this one",
                fix="Run python train.py command=parity by itself, in an allocation with the devices it needs",
            )
        if run.config.data.rollouts is not None:
            raise ConfigError(
                key="data.rollouts",
                got=run.config.data.rollouts,
                because="command=parity compares layouts on rollouts that it makes itself",
                fix="Leave data.rollouts out",
            )
        with run.locked():
            run.check()
            run.save_config(invocation.settled_config(run), invocation.provenance)
            return 0 if check_parity(run, self) else DIFFERENT_NUMBERS
