"""Draws the plan of a heavy-tailed optimizer step, ranks against time, without and with rows that ranks share.

A box is one micro-batch: as long as it takes, as high as the ranks that share it. White is a rank that waits. Lengths
are those of a case of ``planner_cases.json``; time is cost by the default cost model, 1.0 for all work level.

    python benchmarks/plan_picture.py [--case NAME] [--step N] [--widest N] [--out PATH]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from rlmodule.batching.plan import MiniBatchPlan, plan_batch
from rlmodule.batching.workload import Workload
from rlmodule.core.types import SampleMeta

CASES = Path(__file__).with_name("planner_cases.json")
DRAWN = Path(__file__).parents[1] / "docs" / "img" / "shared_rows.png"
COLOURS = {1: "#9ecae1", 2: "#fdd0a2", 4: "#fdae6b", 8: "#e6550d", 16: "#a63603", 32: "#7f2704", 64: "#4a1486"}


def draw(axes: Axes, plan: MiniBatchPlan, ideal: float) -> None:
    """Boxes of every micro-batch, and lines where all ranks begin the next micro-step."""
    start = 0.0
    for step in range(plan.num_micro_steps):
        rank = 0
        while rank < len(plan.cost):
            width, cost = plan.width(rank, step), plan.cost[rank][step] / ideal
            axes.add_patch(Rectangle((start, rank), cost, width, facecolor=COLOURS[width], edgecolor="white", lw=0.3))
            rank += width
        start += max(ranks[step] for ranks in plan.cost) / ideal
        axes.axvline(start, color="black", lw=0.6)
    axes.set_ylim(0, len(plan.cost))
    axes.set_ylabel("data rank")
    axes.axvline(1.0, color="green", lw=1.2, ls="--")


def main() -> None:
    """Plan both ways and draw one above the other, on the same scale; and the second one enlarged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="pareto32k-1024x64x4")
    parser.add_argument("--step", type=int, default=0, help="which optimizer step of the case")
    parser.add_argument("--widest", type=int, default=8, help="most ranks that share a row")
    parser.add_argument("--out", type=Path, default=DRAWN)
    args = parser.parse_args()
    case = next(case for case in json.loads(CASES.read_text())["cases"] if case["name"] == args.case)
    metas = [SampleMeta(i, i // 8, 1, n - 1, n - 1) for i, n in enumerate(case["lengths"])]
    sizes = {name: case[name] for name in ("mini_batch_size", "dp_size", "token_budget")}
    alone, shared = (
        plan_batch(metas, **sizes, cost=Workload(), widest=widest)[args.step] for widest in (1, args.widest)
    )
    ideal = sum(map(sum, alone.cost)) / case["dp_size"]

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 10.5), height_ratios=(1, 1, 1.35))
    for axes, plan, name in (
        (top, alone, "each rank has its own rows (max_sp_size=1)"),
        (middle, shared, f"up to {args.widest} neighbours share a row (max_sp_size={args.widest}), the same scale"),
        (bottom, shared, "the same, enlarged"),
    ):
        draw(axes, plan, ideal)
        time = plan.lockstep_cost / ideal
        axes.set_xlim(0, (plan if axes is bottom else alone).lockstep_cost / ideal * 1.01)
        axes.set_title(
            f"{name}: {time:.2f} times the ideal, {plan.longest_row:,} tokens on a rank at most", fontsize=10
        )
    bottom.set_xlabel("time of one optimizer step; 1.0 (dashed) where all work is level over all ranks")
    widths = sorted({width for ranks in shared.widths for width in ranks})
    patches = [Patch(facecolor=COLOURS[w], label="own row" if w == 1 else f"row of {w} ranks") for w in widths]
    middle.legend(handles=patches, loc="lower right", fontsize=9)
    figure.suptitle(f"{case['mini_batch_size']} samples of {args.case} on {case['dp_size']} ranks", fontsize=11)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)
    print(f"{args.out}: {alone.lockstep_cost / ideal:.2f} -> {shared.lockstep_cost / ideal:.2f} times the ideal")


if __name__ == "__main__":
    main()
