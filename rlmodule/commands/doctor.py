"""``command=doctor``: measure, on the ranks of a configured run, what its plans otherwise take from arithmetic.

Today that is the price of sharing rows (``batching.max_sp_size``); trains nothing and needs no data.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import ClassVar

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.config import at_least
from rlmodule.records.metrics_log import atomic_write
from rlmodule.run.build.distributed import on_rank_zero
from rlmodule.run.run import Run
from rlmodule.run.sharing_cost import SharingCost, check_sharing, measure_sharing

RESULT = "doctor.json"
KEY, FAR_KEY = "batching.sp_overhead", "batching.sp_overhead_across_nodes"


@COMMANDS.register
@dataclass(frozen=True)
class Doctor(Command):
    """Measure what the run's plans assume of this machine, and say which key takes it."""

    starts_ranks: ClassVar[bool] = True

    row_tokens: int | None = None  # tokens of the row that is shared; null for those of the longest sample
    rounds: int = 5  # measurements of each width, of which the median counts

    def __post_init__(self) -> None:
        if self.row_tokens is not None:
            at_least("row_tokens", self.row_tokens, 8)
        at_least("rounds", self.rounds, 1)

    def __call__(self, invocation: Invocation) -> int:
        """Measure on as many processes as the command line asks for.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        run = invocation.run.with_other_ranks()
        with ExitStack() as held:
            on_rank_zero(lambda: held.enter_context(run.locked()))
            check_sharing(run)
            run.unpack_model()
            run.config.launcher.check()
            run.check_strategy()
            run.check_models()
            run.save_config(invocation.settled_config(run), invocation.provenance)
            if run.needs_launcher:
                return invocation.start_ranks(run.run_dir.root, run.machine.num_processes)
            self.on_rank(run)
        return 0

    def on_rank(self, run: Run) -> None:
        """This rank's part; the first one shows and writes what came out."""
        cost = measure_sharing(run, self.row_tokens or run.config.longest_sample, self.rounds)
        keys = keys_to_set(cost, run.machine.world_size // run.config.trainer.num_nodes)
        if not run.is_rank_zero:
            return
        document = asdict(cost) | {"overheads": cost.overheads, "keys": keys}
        with atomic_write(run.run_dir.root / RESULT) as path:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print("\n".join(lines(run, cost, keys, self.rounds)), flush=True)


def keys_to_set(cost: SharingCost, node_size: int) -> dict[str, float]:
    """Full key -> value: the highest price of the widths that it is for; below 0 (nothing to see) it is 0."""
    found: dict[str, float] = {}
    for width, overhead in cost.overheads.items():
        key = KEY if width <= node_size else FAR_KEY
        found[key] = max(found.get(key, 0.0), round(overhead, 3))
    return found


def lines(run: Run, cost: SharingCost, keys: dict[str, float], rounds: int) -> list[str]:
    """What is printed."""
    clock = "CPU s" if run.machine.device == "cpu" else "s"
    told = [
        f"{'row':<12} {cost.tokens:,} tokens, forward and backward, {run.machine.describe()}, "
        f"strategy={run.config.backend}, medians of {rounds}",
        f"{'any row':<12} {cost.fixed:.4f} {clock}, whatever its length; not part of what follows",
    ]
    for width, seconds in cost.seconds.items():
        name = f"shared by {width}" if width > 1 else "alone"
        overhead = f"   exchange {cost.overheads[width]:+.3f} of the row" if width > 1 else ""
        told.append(f"{name:<12} {seconds - cost.fixed:.4f} {clock}{overhead}")
    now = {KEY: run.config.batching.sp_overhead, FAR_KEY: run.config.batching.sp_overhead_across_nodes}
    told += [f"{'set':<12} {key}={value} (now {now[key]})" for key, value in keys.items()]
    return told
