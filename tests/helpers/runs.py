"""Whole runs in this process: composed, checked and fitted as ``train.py`` does it, on a model of 15,000 weights.

Without the command line and without the supervisor; those are in ``end_to_end/``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlmodule.commands import Invocation
from rlmodule.records.metrics_log import Record, read_records
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.composing import compose

SMALL = (
    "debug=fast",
    "algorithm.train_batch_size=4",
    "rollout.n=4",
    "batching.mini_batch_size=8",
    "environment.train_size=32",
    "environment.test_size=4",
    # A random model ends by itself in one of five responses: cut ones score 1, so that rewards differ within groups.
    "data.max_response_length=48",
    "reward.truncated=1.0",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=16",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "model.architecture.head_dim=8",
    "optimizer.schedule=constant",
    "optimizer.lr=1e-2",
    "trainer.num_threads=1",
    "callbacks.report.curves=false",
    "logger=none",
)
# A random model ends a response after four tokens on average: there is room for several turns.
SHORT_TURNS = f"rollout.stop_token_ids={list(range(64))}".replace(" ", "")
STEPS_PER_ITERATION = 2  # 4 prompts x 4 responses in mini-batches of 8
MADE_OF_TIME = ("timing_s/", "cpu_s/", "perf/")  # differ from run to run
MADE_OF_THE_LAYOUT = ("balance/", "global_seqlen/")  # differ with the number of ranks, and with nothing else


def small_run(run_dir: Path, *overrides: str) -> Run:
    """A run that takes a fraction of a second."""
    has_sizes = not {"data=files", "environment=custom"} & set(overrides)
    base = [word for word in SMALL if has_sizes or not word.startswith("environment.")]
    config = compose(*base, f"run_dir={run_dir}", *overrides)
    run = Run.read(config, RunDirectory(run_dir), STRATEGIES)
    run.check()
    return run


def invocation(run_dir: Path, *overrides: str) -> Invocation:
    """A call of a command on a small run, in this process; no rank is started."""

    def not_here(*_: object) -> Any:
        raise AssertionError("a test in one process starts no other")

    node = compose(*SMALL, f"run_dir={run_dir}", *overrides)
    run = Run.read(node, RunDirectory(run_dir), STRATEGIES)
    return Invocation(
        lambda: run, lambda _: OmegaConf.to_yaml(node, resolve=True), "command: a test\n", not_here, not_here
    )


def run_small(run_dir: Path, *overrides: str) -> list[Record]:
    """Fit one; returns its records."""
    small_run(run_dir, *overrides).fit()
    return read_records(run_dir / "metrics.jsonl")


def numbers(
    records: list[Record], *, without: tuple[str, ...] = MADE_OF_TIME
) -> list[tuple[str, int, dict[str, float]]]:
    """(kind, step, metrics) of every record, less what differs by its nature."""
    return [
        (r.kind, r.step, {name: value for name, value in r.metrics.items() if not name.startswith(without)})
        for r in records
    ]


def rollouts(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """File name -> responses of one iteration, as they were sampled."""
    return {
        path.name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((run_dir / "rollouts").glob("*.jsonl"))
    }
