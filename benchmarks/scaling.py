"""How cost grows: planning with samples and ranks, a step with tokens, memory with tokens, vocabulary and ranks.

planning   CPU seconds and peak memory of one plan by the joint planner, samples and ranks growing together
step       CPU seconds of an update (forward, loss, backward, AdamW) against tokens
head       megabytes that log-probabilities, entropy and their backward pass take at their peak (see memory.py)
ranks      megabytes of weights and moments that each rank keeps under `strategy=fsdp2`, counted after one step

python benchmarks/scaling.py [--small] [--json PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import torch
from loop import Loaded, fit
from memory import measure_apart
from planner import measured_scale
from torch import Tensor
from update import Ours, Sizes, make_rows, seconds

from rlmodule.core.layout import Layout
from strategies.registry import STRATEGIES

MEGABYTE = 2**20


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Points:
    """Where each curve is measured.

    Args:
        planning: (samples, ranks).
        groups: of eight rollouts in a step.
        head: (vocabulary, loss tokens).
        ranks: processes.
        sizes: of the model that trains.
    """

    planning: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    head: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    sizes: Sizes


SMALL = Points(
    planning=((1_000, 8), (4_000, 32)),
    groups=(1, 2),
    head=((8_192, 256), (8_192, 512)),
    ranks=(1, 2),
    sizes=Sizes(2_048, hidden=128, layers=2),
)
FULL = Points(
    planning=((1_000, 8), (10_000, 64), (100_000, 512), (1_000_000, 4_096)),
    groups=(1, 2, 4),
    head=((32_768, 1_024), (32_768, 4_096), (151_936, 1_024), (151_936, 4_096)),
    ranks=(1, 2, 4),
    sizes=Sizes(8_192, hidden=256, layers=4),
)


def planning(points: Points) -> list[dict[str, Any]]:
    """One mini-batch of all samples, each plan in a process of its own so that its peak memory is its own."""
    rows = []
    for samples, ranks in points.planning:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(measured_scale, (samples, ranks, samples))
        rows.append({"samples": samples, "ranks": ranks, **measured})
    return rows


def step(points: Points) -> list[dict[str, Any]]:
    """An update of more and more rollouts."""
    rows = []
    for groups in points.groups:
        rollouts = make_rows(groups, 8, points.sizes.vocabulary)
        way = Ours(rollouts, points.sizes.model())
        way.step()
        cpu_s = statistics.median(seconds(way.step) for _ in range(3))
        rows.append({"tokens": sum(row.sample.meta.length for row in rollouts), "cpu_s": cpu_s})
    return rows


def head(points: Points) -> list[dict[str, Any]]:
    """Peak memory of the head by vocabulary and loss tokens."""
    return [
        {"vocabulary": vocabulary, "tokens": tokens, **measure_apart("rlmodule", vocabulary, tokens)}
        for vocabulary, tokens in points.head
    ]


def ranks(points: Points) -> list[dict[str, Any]]:
    """Megabytes of the rank that keeps most."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for world_size in points.ranks:
        port = free_port()
        with context.Pool(world_size) as pool:
            kept = pool.starmap(kept_bytes, [(rank, world_size, port, points.sizes) for rank in range(world_size)], 1)
        parameters, moments = (max(column) / MEGABYTE for column in zip(*kept, strict=True))
        rows.append({"ranks": world_size, "parameters_mb": parameters, "moments_mb": moments})
    return rows


def kept_bytes(rank: int, world_size: int, port: int, sizes: Sizes) -> tuple[int, int]:
    """(weights, moments) that this rank holds after a step."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    kind = STRATEGIES.lookup("language_model", "fsdp2", device="cpu")
    strategy = kind(kind.config_class(), device="cpu", num_processes=world_size, num_nodes=1)
    loaded = Loaded(make_rows(1, 8, sizes.vocabulary), steps=1, layout=Layout(world_size, rank))
    trainer = fit(loaded, sizes, strategy, [], devices=world_size)
    weights = [parameter for _, parameter in strategy.named_parameters("policy")]
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return sum(map(local_bytes, weights)), sum(map(local_bytes, moments))


def local_bytes(tensor: Tensor) -> int:
    """What of a tensor is in this process."""
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return local.numel() * local.element_size()


CURVES = {"planning": planning, "step": step, "head": head, "ranks": ranks}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few and small points")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for name, measure in CURVES.items():
        report[name] = measure(SMALL if args.small else FULL)
        for row in report[name]:
            sample_info = (
                f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(f"{name:<9} {', '.join(sample_info)}", flush=True)
    if args.json:
        record.write(args.json, report)


if __name__ == "__main__":
    main()
