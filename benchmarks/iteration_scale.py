"""What an iteration costs a rank among thousands, beside its own samples: facts of all samples, plan, metrics.

facts        what the other ranks tell of their samples, unpacked and joined (the exchange itself is not there)
advantages   inputs and GRPO over all samples
plan         shuffle and joint plan of every mini-batch, and the ranks of this rank's samples
iteration    metrics of the iteration
step         metrics of one optimizer step, merged over the ranks

One process plays one of the ranks; CPU seconds and megabytes above what the process had before. With --ranks, that many
gloo processes on this machine gather the facts for real.

python benchmarks/iteration_scale.py [--small] [--ranks N] [--json PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import resource
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import merge_rows
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.failures import reward_counts
from rlmodule.experience.iteration_metrics import length_metrics, reward_metrics, staleness_metrics
from rlmodule.experience.sample_table import Numbers, SampleTable
from rlmodule.losses.ppo_clip import PPOClip
from strategies.parts.collectives import GroupCollectives, LocalCollectives

NUM_METRICS = 40  # of an optimizer step
GROUP = 8  # responses to a prompt


def table_of(rank: int, count: int) -> SampleTable:
    """Samples of one rank, with lengths and rewards drawn at random."""
    draw, none = np.random.default_rng(rank), np.zeros(count, bool)
    length = draw.lognormal(7.5, 0.8, count).clip(64, 8192).astype(np.int64)
    sample_id = np.arange(rank * count, (rank + 1) * count)
    metas = SampleMetas(sample_id, sample_id // GROUP, np.full(count, 100), length, length, none, none, ~none)
    reward = draw.integers(0, 2, count).astype(float)
    parts = {"format": Numbers(draw.random(count), ~none)}
    version = np.zeros(count, np.int64)
    return SampleTable(metas, reward, np.full(count, np.nan), none, version, none, parts, {}, {}, {})


@dataclass
class Measured:
    """CPU seconds of one part after the other."""

    cpu_s: dict[str, float]
    since: float = 0.0

    def start(self) -> None:
        self.since = time.process_time()

    def stop(self, name: str) -> None:
        self.cpu_s[name] = time.process_time() - self.since
        self.start()


def measured_rank(samples: int, ranks: int, steps: int) -> dict[str, Any]:
    """One iteration of rank 1 of ``ranks``."""
    torch.set_num_threads(1)
    payloads = [pickle.dumps(table_of(rank, samples // ranks), protocol=5) for rank in range(ranks)]
    rows = torch.rand(ranks, NUM_METRICS, 3, dtype=torch.float64)
    rows[:, :, 2] = torch.arange(NUM_METRICS) % 4
    objective, collectives = Objective(PPOClip(), AlgorithmConfig()), LocalCollectives()
    stage = AdvantageStage(objective, GRPO(), collectives)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = Measured({})
    spent.start()
    table = SampleTable.joined([pickle.loads(payload) for payload in payloads]).by_sample_id()
    metrics = reward_counts(table)
    spent.stop("facts")
    advantages = stage.advantages(stage.inputs(table, {}, metrics))
    assert advantages is not None, "PPO reads them"
    metas = replace(table.metas, is_skipped=advantages.is_zero.numpy())
    means = advantages.means
    spent.stop("advantages")
    sampler = sampler_of(metas, samples // steps, Layout(ranks, 1))
    sampler.owners(sampler.first_pass, range(samples // ranks, 2 * samples // ranks))
    share = sampler.remaining()
    spent.stop("plan")
    metrics |= reward_metrics(table) | length_metrics(table) | staleness_metrics(table)
    spent.stop("iteration")
    merge_rows([f"metric {i}" for i in range(NUM_METRICS)], rows)
    spent.stop("step")
    assert len(share) == len(sampler.plans) and len(means) == samples, "an iteration"
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    lockstep = [1 / plan.lockstep_efficiency for plan in sampler.plans]
    return {"cpu_s": spent.cpu_s, "peak_mb": peak, "lockstep": max(lockstep)}


def sampler_of(metas: SampleMetas, mini_batch_size: int, layout: Layout) -> BalancedSampler:
    """The sampler of an iteration."""
    return BalancedSampler(metas, BatchingConfig(mini_batch_size=mini_batch_size), layout, seed=0, iteration=0)


def gathered(rank: int, world_size: int, port: int, samples: int) -> float:
    """CPU seconds of this rank to gather the facts of all, from the second time on."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    collectives, mine, spent = GroupCollectives(torch.device("cpu")), table_of(rank, samples // world_size), []
    for _ in range(4):
        start = time.process_time()
        SampleTable.joined(collectives.gather_objects(mine))
        spent.append(time.process_time() - start)
    dist.destroy_process_group()
    return float(np.median(spent[1:]))


def on_processes(world_size: int, samples: int) -> dict[str, Any]:
    """The exchange of facts between gloo processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with multiprocessing.get_context("spawn").Pool(world_size) as pool:
        spent = pool.starmap(gathered, [(rank, world_size, port, samples) for rank in range(world_size)], 1)
    return {"ranks": world_size, "samples": samples, "cpu_s": max(spent)}


def apart(samples: int, ranks: int, steps: int) -> dict[str, Any]:
    """``measured_rank`` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        measured: dict[str, Any] = pool.apply(measured_rank, (samples, ranks, steps))
    return {"samples": samples, "ranks": ranks, "steps": steps, **measured}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each."""
    for row in rows:
        parts = ", ".join(f"{name} {spent:.3f}" for name, spent in row["cpu_s"].items())
        print(
            f"{row['samples']:9,} samples, {row['ranks']:5,} ranks, {row['steps']} steps: "
            f"{sum(row['cpu_s'].values()):.2f} CPU s ({parts}), "
            f"{row['peak_mb']:.0f} MB, lock-step {row['lockstep']:.4f}",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="4,096 samples on 64 ranks")
    parser.add_argument("--ranks", type=int, default=0, help="gloo processes that gather the facts for real")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    points = ((4_096, 64, 1),) if args.small else ((8_192, 64, 1), (131_072, 512, 4), (1_048_576, 4_096, 4))
    rows = [apart(*point) for point in points]
    show(rows)
    report: dict[str, Any] = {"iterations": rows}
    if args.ranks:
        report["gathered"] = on_processes(args.ranks, points[-1][0])
        words = "gathered by {ranks} gloo processes: {samples:,} samples, {cpu_s:.3f} CPU s each"
        print(words.format(**report["gathered"]))
    if args.json:
        record.write(args.json, report)


if __name__ == "__main__":
    main()
