"""What an iteration costs a rank among thousands, beside its own samples: facts of all samples, plan, metrics.

facts        what the other ranks tell of their samples, unpacked and joined (the exchange itself is not there)
advantages   inputs and GRPO over all samples
plan         shuffle, the joint plan of the mini-batches that this rank packs, those of the other ranks as they tell
             them, and the ranks of this rank's samples; ``plan alone`` is the same where every rank packs them all
iteration    metrics of the iteration
ledger       every sample checked and counted
step         metrics of one optimizer step, merged over the ranks

One process plays one of the ranks, and another one has made before what the others tell. CPU seconds, and megabytes
above what the process had before, the most in each part; what earlier parts made and later ones read is in there. With
--ranks, that many gloo processes on this machine gather the facts and share the planning for real.

python benchmarks/iteration_scale.py [--small] [--ranks N] [--json PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.packing import PackAll, Packing, PackingJob, pack_in_turn
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.layout import Layout
from rlmodule.core.metrics import merge_rows
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.failures import reward_counts
from rlmodule.experience.iteration import Experience, Iteration
from rlmodule.experience.iteration_metrics import advantage_metrics, length_metrics, reward_metrics, staleness_metrics
from rlmodule.experience.ledger import Ledger
from rlmodule.experience.packing_over_ranks import PackingOverRanks
from rlmodule.experience.sample_table import Numbers, SampleTable
from rlmodule.losses.ppo_clip import PPOClip
from strategies.parts.collectives import GroupCollectives, LocalCollectives, unpickled

NUM_METRICS = 40  # of an optimizer step
GROUP = 8  # responses to a prompt
RANK = 1  # that is played


def table_of(rank: int, ranks: int, count: int) -> SampleTable:
    """Samples of one rank, which has every n-th group, with lengths and rewards drawn at random."""
    draw, none = np.random.default_rng(rank), np.zeros(count, bool)
    length = draw.lognormal(7.5, 0.8, count).clip(64, 8192).astype(np.int32)
    group = np.arange(count) // GROUP * ranks + rank
    sample_id = group * GROUP + np.arange(count) % GROUP
    metas = SampleMetas(sample_id, group, np.full(count, 100, np.int32), length, length, none, none, ~none)
    reward = draw.integers(0, 2, count).astype(float)
    parts = {"format": Numbers(draw.random(count), ~none)}
    version = np.zeros(count, np.int32)
    return SampleTable(metas, reward, np.full(count, np.nan), none, version, *[none] * 4, parts, {}, {}, {})


@dataclass
class Measured:
    """CPU seconds of one part after the other, and the most memory in each."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    before: float = 0.0
    since: float = 0.0

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the most from here on
        self.since = time.process_time()

    def stop(self, name: str) -> None:
        self.cpu_s[name] = time.process_time() - self.since
        self.peak_mb[name] = most_mb() - self.before
        self.start()


def most_mb() -> float:
    """The most memory that this process had since it was last asked to forget."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


@dataclass
class Told:
    """Collectives of a rank whose others have told beforehand.

    Args:
        folder: holds what they told, as ``prepare`` left it.
        sums: of the calls that are still to come.
    """

    folder: Path
    sums: list[np.ndarray]

    def gather_objects(self, item: Any) -> list[Any]:
        sizes = np.load(self.folder / "sizes.npy").tolist()
        return unpickled(torch.from_numpy(np.fromfile(self.folder / "facts", np.uint8)), sizes)

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        told, mine = self.sums.pop(0), numbers.numpy()
        assert ((mine == 0) | (mine == told)).all(), "this rank tells what the others expect"
        return torch.from_numpy(told)


def prepare(folder: Path, samples: int, ranks: int, steps: int) -> None:
    """Write what all ranks tell: their facts, and the packings of the mini-batches."""
    facts = [pickle.dumps(table_of(rank, ranks, samples // ranks).packed(), protocol=5) for rank in range(ranks)]
    longest = max(map(len, facts))
    (folder / "facts").write_bytes(b"".join(part.ljust(longest, b"\0") for part in facts))
    np.save(folder / "sizes.npy", [len(part) for part in facts])
    packings: list[Packing] = []

    def kept(jobs: Sequence[PackingJob]) -> Sequence[Packing]:
        packings.extend(pack_in_turn(jobs))
        return packings

    table = SampleTable.gathered([pickle.loads(part) for part in facts])
    advantages = AdvantageStage(OBJECTIVE, GRPO(), LocalCollectives())
    worth = advantages.advantages(advantages.inputs(table, {}, {}))
    assert worth is not None, "PPO reads them"
    sampler_of(replace(table.metas, is_skipped=worth.is_zero.numpy()), samples // steps, Layout(ranks, RANK), kept)
    np.save(folder / "shapes.npy", np.array([[packing.num_steps, 0] for packing in packings]))
    np.save(folder / "cells.npy", np.concatenate([packing.cell for packing in packings]).astype(np.int32))


OBJECTIVE = Objective(PPOClip(), AlgorithmConfig())


def measured_rank(folder: Path, samples: int, ranks: int, steps: int, over_ranks: bool) -> dict[str, Any]:
    """One iteration of rank 1 of ``ranks``."""
    torch.set_num_threads(1)
    rows = torch.rand(ranks, NUM_METRICS, 3, dtype=torch.float64)
    rows[:, :, 2] = torch.arange(NUM_METRICS) % 4
    told = Told(folder, [np.load(folder / "shapes.npy"), np.load(folder / "cells.npy")])
    stage, layout, mine = AdvantageStage(OBJECTIVE, GRPO(), LocalCollectives()), Layout(ranks, RANK), samples // ranks
    pack_all = PackingOverRanks(layout, told) if over_ranks else pack_in_turn  # type: ignore[arg-type]
    own = table_of(RANK, ranks, mine)
    spent = Measured()
    spent.start()
    spent.before = most_mb()
    table = SampleTable.gathered(told.gather_objects(own.packed()))
    metrics = reward_counts(table)
    spent.stop("facts")
    advantages = stage.advantages(stage.inputs(table, {}, metrics))
    assert advantages is not None, "PPO reads them"
    metas = replace(table.metas, is_skipped=advantages.is_zero.numpy())
    means = advantages.means
    spent.stop("advantages")
    sampler = sampler_of(metas, samples // steps, layout, pack_all)
    here = table.positions_of(own.metas.sample_id.tolist())
    sampler.owners(sampler.first_pass, here)
    sampler.speakers(sampler.first_pass, here)
    share = sampler.remaining()
    spent.stop("plan")
    iteration = Iteration(table, means, Experience({}, 0, samples), sampler, metrics)
    metrics |= reward_metrics(table) | length_metrics(table) | staleness_metrics(table) | advantage_metrics(iteration)
    spent.stop("iteration")
    ledger = Ledger(GROUP)
    ledger.check(iteration, samples // GROUP)
    ledger.settle(iteration, samples // GROUP, ())
    spent.stop("ledger")
    merge_rows([f"metric {i}" for i in range(NUM_METRICS)], rows)
    spent.stop("step")
    assert len(share) == len(sampler.plans) and len(means) == samples, "an iteration"
    lockstep = [1 / plan.lockstep_efficiency for plan in sampler.plans]
    return {"cpu_s": spent.cpu_s, "peak_mb": spent.peak_mb, "lockstep": max(lockstep)}


def sampler_of(
    metas: SampleMetas, mini_batch_size: int, layout: Layout, pack_all: PackAll = pack_in_turn
) -> BalancedSampler:
    """The sampler of an iteration."""
    config = BatchingConfig(mini_batch_size=mini_batch_size)
    return BalancedSampler(metas, config, layout, seed=0, iteration=0, pack_all=pack_all)


def exchanged(rank: int, world_size: int, port: int, samples: int, steps: int) -> dict[str, float]:
    """CPU seconds of this rank to gather the facts of all, and to plan with the others, the second time."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    collectives, layout = GroupCollectives(torch.device("cpu")), Layout(world_size, rank)
    mine = table_of(rank, world_size, samples // world_size)
    table = SampleTable.gathered(collectives.gather_objects(mine.packed()))
    pack_all = PackingOverRanks(layout, collectives)
    plans = {"plan": pack_all, "plan alone": pack_in_turn}
    ways: dict[str, Callable[[], Any]] = {
        "facts": lambda: SampleTable.gathered(collectives.gather_objects(mine.packed())),
        **{name: partial(sampler_of, table.metas, samples // steps, layout, way) for name, way in plans.items()},
    }
    spent: dict[str, float] = {}
    made: dict[str, Any] = {}
    for _ in range(2):
        for name, way in ways.items():
            start = time.process_time()
            made[name] = way()
            spent[name] = time.process_time() - start
    assert made["plan"].plans == made["plan alone"].plans, "the same plan"
    dist.destroy_process_group()
    return spent


def on_processes(world_size: int, samples: int, steps: int) -> dict[str, Any]:
    """The exchanges between gloo processes; of the process that they cost most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with multiprocessing.get_context("spawn").Pool(world_size) as pool:
        spent = pool.starmap(exchanged, [(rank, world_size, port, samples, steps) for rank in range(world_size)], 1)
    cpu_s = {name: max(one[name] for one in spent) for name in spent[0]}
    return {"ranks": world_size, "samples": samples, "steps": steps, "cpu_s": cpu_s}


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measured(samples: int, ranks: int, steps: int) -> dict[str, Any]:
    """One rank's iteration, and its plan where every rank packs every mini-batch."""
    with tempfile.TemporaryDirectory() as folder:
        apart(prepare, Path(folder), samples, ranks, steps)
        alone = apart(measured_rank, Path(folder), samples, ranks, steps, False)
        found = apart(measured_rank, Path(folder), samples, ranks, steps, True)
    return {"samples": samples, "ranks": ranks, "steps": steps, **found, "plan_alone_cpu_s": alone["cpu_s"]["plan"]}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each."""
    for row in rows:
        parts = ", ".join(f"{name} {spent:.3f} s {row['peak_mb'][name]:.0f} MB" for name, spent in row["cpu_s"].items())
        print(
            f"{row['samples']:9,} samples, {row['ranks']:5,} ranks, {row['steps']} steps: "
            f"{sum(row['cpu_s'].values()):.2f} CPU s, {max(row['peak_mb'].values()):.0f} MB ({parts}); "
            f"plan alone {row['plan_alone_cpu_s']:.3f} s, lock-step {row['lockstep']:.4f}",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="4,096 samples on 64 ranks")
    parser.add_argument("--ranks", type=int, default=0, help="gloo processes that exchange for real")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    points = ((4_096, 64, 1),) if args.small else ((8_192, 64, 1), (131_072, 512, 4), (1_048_576, 4_096, 4))
    rows = [measured(*point) for point in points]
    show(rows)
    report: dict[str, Any] = {"iterations": rows}
    if args.ranks:
        report["exchanged"] = on_processes(args.ranks, points[-1][0], points[-1][2])
        found = report["exchanged"]
        spent = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["cpu_s"].items())
        print(f"{found['ranks']} gloo processes, {found['samples']:,} samples: {spent} CPU s each")
    if args.json:
        record.write(args.json, report)


if __name__ == "__main__":
    main()
