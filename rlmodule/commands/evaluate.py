"""``command=evaluate``: a policy or a reward model on held-out rows, without training.

It leaves a table, ``evaluation.json``, answers and what loggers show. The model is that of a run, a checkpoint, a
Hugging Face folder or a hub name; rows, reward and sampling are those of the run or of the command line. The numbers
are those that a run gets when it validates, on any number of processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlmodule.commands import COMMANDS, Command, Invocation
from rlmodule.core.errors import ConfigError
from rlmodule.core.metrics import CI_HIGH, CI_LOW
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.rows import without_nan
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.distributed import on_rank_zero
from rlmodule.run.evaluation_run import EvaluationRun
from rlmodule.run.run import Run
from rlmodule.run.saved.policy_source import EXPORTED, NEWEST, Place, PolicySource

RESULT = "evaluation.json"
ORDER = (EXPORTED, NEWEST)


@COMMANDS.register
@dataclass(frozen=True)
class Evaluate(PolicySource, Command):
    """Evaluate a policy or a reward model; ``auto`` is what was exported, or else the newest checkpoint."""

    starts_ranks: ClassVar[bool] = True

    def __call__(self, invocation: Invocation) -> int:
        """Evaluate on as many processes as the command line asks for.

        Raises:
            RLModuleError: there are no such weights or rows, or they do not go together.
        """
        run = invocation.run.with_other_ranks()
        with ExitStack() as held:
            on_rank_zero(lambda: held.enter_context(run.locked()))
            made, place = self._prepared(run)
            dataset = made.check()
            if run.is_rank_zero:
                (run.run_dir.root / "config.yaml").write_text(invocation.settled_config(run), encoding="utf-8")
                (run.run_dir.root / "command.txt").write_text(invocation.provenance, encoding="utf-8")
                label = "reward model" if run.config.model.is_reward_model else "policy"
                print(f"{label:<12} {place.described}")
                print(f"{'held out':<12} {dataset.describe_held_out()}")
                if words := dataset.describe_sampling():
                    print(f"{'sampling':<12} {words}", flush=True)
            if run.needs_launcher:
                return invocation.start_ranks(run.run_dir.root, run.machine.num_processes)
            self.on_rank(run)
        return 0

    def on_rank(self, run: Run) -> None:
        """This rank's part; the first one shows and writes what came out."""
        made, place = self._prepared(run)
        record = made.evaluate()
        if not run.is_rank_zero:
            return
        metrics = {name: value for name, value in record.metrics.items() if name.startswith("val/")}
        write_result(run.run_dir, place, metrics)
        console = Console(file=sys.stdout)
        console.print(table(metrics, f"{place.described}"))
        for label, path in output_paths(run.run_dir).items():
            console.print(f"{label:<12} {path}", soft_wrap=True, highlight=False, markup=False)

    def _prepared(self, run: Run) -> tuple[EvaluationRun, Place]:
        place = self.place_for(run, ORDER)
        if place.folder is None and run.config.model.path is None:
            raise ConfigError(
                key="model.path",
                got=None,
                because="there is no trained policy to evaluate",
                fix="Use python train.py evaluate RUN, or model.path=FOLDER",
            )
        began_as = place.began_as if run.config.ranks_pairs_by_reference else None
        checkpoint = place.folder if place.is_checkpoint else None
        return EvaluationRun(place.settled(), run.run_dir, checkpoint, began_as), place


def write_result(directory: RunDirectory, place: Place, metrics: Mapping[str, float]) -> None:
    """Write ``evaluation.json``: what was evaluated, on what and how, and every number."""
    config = place.run.config
    document = {
        "policy": place.described,
        "run": None if place.root is None else str(place.root),
        "environment": config.environment_name,
        "val_files": config.data.val_files,
        "val": vars(config.val),
        "metrics": dict(metrics),
    }
    with atomic_write(directory.root / RESULT) as aside:
        aside.write_text(json.dumps(without_nan(document), indent=2) + "\n", encoding="utf-8")


def output_paths(directory: RunDirectory) -> dict[str, Path]:
    """Label -> path of everything that the evaluation has left behind."""
    root = directory.root
    found = {
        "result": root / RESULT,
        "answers": root / "validation" / "iteration_000000.jsonl",
        "metrics": root / "metrics.jsonl",
        "tensorboard": root / "tensorboard",
    }
    return {label: path for label, path in found.items() if path.exists()}


def table(metrics: Mapping[str, float], title: str) -> Table:
    """Every number, with its 95 % interval over prompts where it has one; those of sets and sources come last."""
    grid = Table(title=escape(title), title_justify="left", title_style="bold")
    grid.add_column("")
    grid.add_column("value", justify="right")
    grid.add_column("95 % interval", justify="right")
    for name in shown_order(metrics):
        interval = ""
        if name + CI_LOW in metrics:
            interval = f"{metrics[name + CI_LOW]:.3f} to {metrics[name + CI_HIGH]:.3f}"
        grid.add_row(escape(name.removeprefix("val/")), f"{metrics[name]:.4g}", interval)
    return grid


def shown_order(metrics: Mapping[str, float]) -> Iterable[str]:
    """Names without the ends of intervals, in the order in which they were made."""
    return [name for name in metrics if not name.endswith((CI_LOW, CI_HIGH))]
