"""Backs the claims on planning: ranks hardly wait for each other, and planning itself takes milliseconds.

For each case (``planner_cases.json``: lengths of samples, data ranks, optimizer steps) the lock-step time of every
planner: the sum over micro-steps of the dearest rank's work, over the work of a rank; 1.0 means no rank ever waits.
``bound`` is a lower limit for the mini-batches as they come; ``joint_free`` makes its own and may go below it. The last
column of steps is that of the planner others use: equal counts by largest differencing, then every rank by itself.

A table before it is of ``joint`` where up to 8 or 64 neighbours share a row (``batching.max_sp_size``), at 3 % of
its cost for the exchange, beside the most tokens that a rank has in one micro-batch.

Times are medians of CPU milliseconds, planners taking turns within each round, samples already at hand as metas.
Absolute times depend on the machine; compare within one run.

    python benchmarks/planner.py [--small] [--large] [--shared-rows] [--json PATH]
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record

from rlmodule.batching.partition import karmarkar_karp
from rlmodule.batching.plan import PLANNERS, MiniBatchPlan, plan_batch
from rlmodule.batching.workload import Exchange, Workload
from rlmodule.core.types import SampleMeta

CASES = Path(__file__).with_name("planner_cases.json")
WIDTHS, PRICE = (1, 8, 64), 0.03  # most ranks that share a row, and what the exchange costs over the row
PARTITIONS = ((1024, 64, True), (1024, 64, False), (1024, 8, True), (8192, 64, True))  # items, parts, equal sizes


def differenced_as_defined(costs: Sequence[float], num_parts: int, equal_size: bool = False) -> list[list[int]]:
    """Largest differencing word by word, for comparison: sets are lists that are copied at every merge."""
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    size = num_parts if equal_size else 1
    heap = []
    for age, start in enumerate(range(0, len(order), size)):
        sets: list[tuple[float, list[int]]] = [(float(costs[item]), [item]) for item in order[start : start + size]]
        sets += [(0.0, [])] * (num_parts - len(sets))
        heap.append((sets[-1][0] - sets[0][0], age, sets))
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda s: (-s[0], not s[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
        age += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def metas_of(lengths: Sequence[int]) -> list[SampleMeta]:
    """Samples of one prompt token, eight to a group; every response token has a loss."""
    return [SampleMeta(i, i // 8, 1, n - 1, n - 1) for i, n in enumerate(lengths)]


def lockstep_time(plans: Sequence[MiniBatchPlan], dp_size: int) -> float:
    """Sum of the micro-steps' dearest ranks over the work of a rank."""
    work = sum(sum(map(sum, plan.cost)) for plan in plans)
    return sum(plan.lockstep_cost for plan in plans) * dp_size / work


def in_turns(tasks: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Results of the tasks, and median CPU milliseconds of each."""
    results: dict[str, Any] = {}
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.process_time()
            results[name] = task()
            taken[name].append((time.process_time() - start) * 1e3)
    return results, {name: median(times) for name, times in taken.items()}


def measured_case(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One row: lock-step time and milliseconds of every planner."""
    metas = metas_of(case["lengths"])
    sizes = {name: case[name] for name in ("mini_batch_size", "dp_size", "token_budget")}
    tasks = {name: partial(plan_batch, metas, **sizes, planner=name) for name in PLANNERS}
    plans, ms = in_turns(tasks, rounds)
    step = {name: lockstep_time(made, case["dp_size"]) for name, made in plans.items()}
    return {"name": case["name"], "bound": case["joint"]["bound"], "step": step, "ms": ms}


def measured_shared(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One row: lock-step time, peak tokens of a rank, micro-steps and milliseconds, by ``WIDTHS``."""
    metas = metas_of(case["lengths"])
    sizes = {name: case[name] for name in ("mini_batch_size", "dp_size", "token_budget")}
    cost = Workload(exchange=Exchange(PRICE, PRICE))
    tasks = {
        width: partial(plan_batch, metas, **sizes, cost=cost, widest=min(width, case["dp_size"])) for width in WIDTHS
    }
    plans, ms = in_turns(tasks, rounds)
    work = float(cost.cost(case["lengths"], case["lengths"]).sum()) / case["dp_size"]
    return {
        "name": case["name"],
        "step": {width: sum(plan.lockstep_cost for plan in made) / work for width, made in plans.items()},
        "peak": {width: max(plan.longest_row for plan in made) for width, made in plans.items()},
        "micro_steps": {width: sum(plan.num_micro_steps for plan in made) for width, made in plans.items()},
        "shared_rows": {width: sum(plan.shared_rows for plan in made) for width, made in plans.items()},
        "ms": ms,
    }


def measured_partition(num_items: int, num_parts: int, equal_size: bool, rounds: int) -> dict[str, Any]:
    """One row: milliseconds of differencing here and word by word, on the same costs."""
    costs = np.random.default_rng(0).lognormal(10.0, 1.0, num_items)
    listed = costs.tolist()
    parts, ms = in_turns(
        {
            "here": lambda: karmarkar_karp(costs, num_parts, equal_size),
            "as defined": lambda: differenced_as_defined(listed, num_parts, equal_size),
        },
        rounds,
    )
    assert parts["here"] == parts["as defined"], "the same partition"
    return {"items": num_items, "parts": num_parts, "equal_size": equal_size, "ms": ms}


def measured_scale(num_samples: int, dp_size: int, mini_batch_size: int) -> dict[str, Any]:
    """One row: the joint planner on very many samples, with the peak memory of this process in MB."""
    lengths = np.random.default_rng(0).lognormal(7.5, 0.8, num_samples).clip(64, 8192).astype(int)
    metas = metas_of(lengths.tolist())
    plans, ms = in_turns(
        {"joint": lambda: plan_batch(metas, mini_batch_size=mini_batch_size, dp_size=dp_size, token_budget=16384)}, 1
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux
    return {
        "name": f"{num_samples} samples, {dp_size} ranks, {len(plans['joint'])} steps",
        "step": lockstep_time(plans["joint"], dp_size),
        "ms": ms["joint"],
        "peak_mb": peak,
    }


def show_cases(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of cases."""
    head = "".join(f"{name:>16s}" for name in ("bound", *PLANNERS))
    print(f"{'lock-step time':22s}{head}{'kk/joint':>10s}   ms: {', '.join(PLANNERS)}")
    for row in rows:
        steps = "".join(f"{row['step'][name]:16.4f}" for name in PLANNERS)
        ratio = row["step"]["karmarkar_karp"] / row["step"]["joint"]
        times = ", ".join(f"{row['ms'][name]:.1f}" for name in PLANNERS)
        print(f"{row['name']:22s}{row['bound']:16.4f}{steps}{ratio:10.2f}   {times}")


def show_shared(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of shared rows."""
    print(f"rows shared by at most {', '.join(map(str, WIDTHS))} ranks, exchange at {PRICE:.0%}")
    print(
        f"{'lock-step time':22s}{'ideal':>8s}" + "".join(f"{width:8d}" for width in WIDTHS) + "   of each: "
        "most tokens of a rank | micro-steps | shared rows | ms"
    )
    for row in rows:
        columns = [
            "  ".join(f"{row[name][width]:{digits}}" for width in WIDTHS)
            for name, digits in (("peak", "6d"), ("micro_steps", "3d"), ("shared_rows", "3d"), ("ms", "6.1f"))
        ]
        steps = "".join(f"{row['step'][width]:8.4f}" for width in WIDTHS)
        print(f"{row['name']:22s}{1:8.4f}{steps}   {' | '.join(columns)}")


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="cases of up to 1024 samples, one round")
    parser.add_argument("--large", action="store_true", help="also a million samples on 4096 ranks (half a minute)")
    parser.add_argument("--shared-rows", action="store_true", help="the table of shared rows alone, one round")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers here")
    args = parser.parse_args()
    rounds = 1 if args.small or args.shared_rows else 5
    cases = [case for case in json.loads(CASES.read_text())["cases"] if len(case["lengths"]) <= 1024 or not args.small]

    shared = [measured_shared(case, rounds) for case in cases]
    show_shared(shared)
    if args.shared_rows:
        if args.json:
            record.write(args.json, {"shared_rows": shared})
        return
    rows = [measured_case(case, rounds) for case in cases]
    show_cases(rows)
    print("\nlargest differencing, ms: here / word by word / ratio")
    partitions = [measured_partition(*sizes, rounds=rounds) for sizes in PARTITIONS]
    for row in partitions:
        here, plain = row["ms"]["here"], row["ms"]["as defined"]
        sizes = "equal sizes" if row["equal_size"] else "free sizes"
        print(
            f"{row['items']:6d} items, {row['parts']:3d} parts, {sizes}: {here:8.2f} {plain:8.2f} {plain / here:6.1f}"
        )
    scales = [] if args.small else [(65_536, 8, 4096)]
    scales += [(1_000_000, 4096, 1_000_000)] if args.large else []
    large = [measured_scale(*sizes) for sizes in scales]
    for row in large:
        print(f"{row['name']}: lock-step {row['step']:.4f}, {row['ms'] / 1e3:.2f} CPU s, peak {row['peak_mb']:.0f} MB")
    if args.json:
        record.write(args.json, {"cases": rows, "shared_rows": shared, "partitions": partitions, "scale": large})


if __name__ == "__main__":
    main()
