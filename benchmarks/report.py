"""Turns what the benchmarks wrote into charts and into the tables of docs/performance.md; measures nothing itself.

python benchmarks/report.py [--results benchmarks/results] [--page docs/performance.md]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
START, END = "<!-- measured: {} -->", "<!-- end: {} -->"
Numbers = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def planner_table(numbers: Numbers) -> str:
    """Lock-step time of every planner, and milliseconds."""
    rows = []
    for case in numbers["cases"]:
        step, ms = case["step"], case["ms"]
        steps = [case["bound"], *(step[planner] for planner in ("joint", "joint_free", "karmarkar_karp"))]
        times = [ms["joint"], ms["karmarkar_karp"]]
        rows.append([case["name"], *(f"{x:.3f}" for x in steps), *(f"{x:.1f}" for x in times)])
    ratio = statistics.median(case["step"]["joint"] / case["step"]["karmarkar_karp"] for case in numbers["cases"])
    head = ["case", "bound", "joint", "joint_free", "karmarkar_karp", "joint ms", "karmarkar_karp ms"]
    large = "".join(
        f"\n{row['name']}: lock-step {row['step']:.4f}, {row['ms'] / 1e3:.2f} CPU s, peak {row['peak_mb']:.0f} MB.\n"
        for row in numbers["scale"]
    )
    return f"{table(head, rows)}\n\nMedian of joint over karmarkar_karp: {ratio:.2f}.\n{large}"


def planner_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """How far each planner is from the bound, case by case."""
    cases = numbers["cases"]
    for name in ("joint", "karmarkar_karp"):
        axes.plot([case["step"][name] / case["bound"] for case in cases], marker="o", linestyle="", label=name)
    axes.set(ylabel="lock-step time / bound", xlabel="case")
    axes.set_yscale("log")
    axes.legend()


def update_table(numbers: Numbers) -> str:
    """CPU seconds, ratio and useful MFU of every way."""
    columns = ("update_cpu_s", "update_ratio", "update_spread", "useful_mfu", "score_cpu_s", "score_ratio")
    rows = [
        [name, *(f"{x[column]:.2f}" for column in columns), f"{x['score_cpu_s'] / x['update_cpu_s']:.3f}"]
        for name, x in numbers["ways"].items()
    ]
    sample_info = (
        f"{numbers['rollouts']} rollouts, {numbers['prompt_tokens']:,} prompt + {numbers['response_tokens']:,} "
        f"response tokens, vocabulary {numbers['vocabulary']:,}, "
        f"{numbers['rounds']} round{'s' * (numbers['rounds'] > 1)}, "
        f"GEMM peak {numbers['gemm_gflop_per_cpu_second']:.0f} GFLOP per CPU second, "
        f"gradient norm {numbers['grad_norm']:.4f} every way."
    )
    head = ["way", "update CPU s", "ratio", "max/min", "useful MFU", "scoring CPU s", "ratio", "scoring / update"]
    return f"{table(head, rows)}\n\n{sample_info}\n"


def update_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """CPU seconds of update and scoring."""
    ways = numbers["ways"]
    for offset, key in ((-0.2, "update"), (0.2, "score")):
        axes.bar([i + offset for i in range(len(ways))], [x[f"{key}_cpu_s"] for x in ways.values()], 0.4, label=key)
    axes.set_xticks(range(len(ways)), list(ways))
    axes.set(ylabel="CPU seconds")
    axes.legend()


def memory_table(numbers: Numbers) -> str:
    """Extra megabytes by loss tokens."""
    rows = [
        [
            row["way"],
            f"{row['tokens']:,}",
            f"{row['extra_mb']:.0f}",
            f"{4 * row['tokens'] * numbers['vocabulary'] / 2**20:.0f}",
        ]
        for row in numbers["rows"]
    ]
    head = ["way", "loss tokens", "extra MB", "one [T, V] tensor, MB"]
    shape = f"Vocabulary {numbers['vocabulary']:,}, hidden size {numbers['hidden']}."
    return f"{table(head, rows)}\n\n{shape}\n\n{steps_table(numbers['steps'])}\n"


def steps_table(steps: list[Numbers]) -> str:
    """Measured and predicted megabytes of a step; a line for each strategy, two columns for each size of model."""
    sizes = list(dict.fromkeys(step["size"] for step in steps))
    rows = []
    for strategy in dict.fromkeys(step["strategy"] for step in steps):
        of_sizes = {step["size"]: step for step in steps if step["strategy"] == strategy}
        pairs = [f"{of_sizes[size][key] / 1e6:.1f}" for size in sizes for key in ("measured", "model")]
        rows.append([strategy, *pairs, f"{max((off(step) for step in of_sizes.values()), key=abs):+.1%}"])
    columns = [f"{size}, {what} MB" for size in sizes for what in ("measured", "model")]
    worst = max(map(off, steps), key=abs)
    return f"{table(['peak of a step', *columns, 'largest off'], rows)}\n\nThe largest difference is {worst:+.1%}."


def off(step: Numbers) -> float:
    """How far the memory model is from what was measured."""
    return float(step["model"] / step["measured"] - 1)


def memory_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """Extra megabytes against loss tokens."""
    for way in dict.fromkeys(row["way"] for row in numbers["rows"]):
        points = [(row["tokens"], row["extra_mb"]) for row in numbers["rows"] if row["way"] == way]
        axes.plot(*zip(*points, strict=True), marker="o", label=way)
    axes.set(xlabel="loss tokens", ylabel="extra MB", ylim=(0, None))
    axes.legend()


def loop_table(numbers: Numbers) -> str:
    """What the loop adds, and what a micro-step costs on the host."""
    low, high = numbers["overhead_interval"]
    row = [f"{numbers[key]:.3f}" for key in ("loop_cpu_s", "bare_cpu_s")]
    row += [f"{numbers['overhead']:+.2%}", f"{low:+.2%} to {high:+.2%}"]
    head = ["", "step through Lightning, CPU s", "bare update, CPU s", "overhead", "95 % interval of the median"]
    loop = table(head, [[f"median of {numbers['steps']} steps", *row]])
    beside = numbers["host"]
    share = table(
        ["per micro-step", *(f"{name.replace('_', ' ')}, ms" for name in beside["ms"]), "step, CPU s", "share"],
        [
            [
                f"{beside['parameters'] / 1e6:.0f}M parameters",
                *(f"{ms:.2f}" for ms in beside["ms"].values()),
                f"{beside['micro_step_cpu_s']:.2f}",
                f"{beside['share']:.3%}",
            ]
        ],
    )
    return f"{loop}\n\n{share}\n"


def loop_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """The ratio of each step."""
    axes.plot(numbers["ratios"], marker="o", linestyle="")
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set(xlabel="step", ylabel="loop / bare")


def rollout_table(numbers: Numbers) -> str:
    """CPU time per token of each way to sample."""
    rows = [
        [
            name,
            f"{x['tokens']:,.0f}",
            f"{x['cpu_s']:.2f}",
            f"{x['ms_per_token']:.3f}",
            f"{x['ratio']:.2f}",
            f"{x['spread']:.2f}",
        ]
        for name, x in numbers["ways"].items()
    ]
    sample_info = (
        f"{numbers['responses']} responses to {numbers['prompts']} prompts, {numbers['limit']} tokens at most, "
        f"hidden size {numbers['hidden']}, vocabulary {numbers['vocabulary']}, {numbers['rounds']} rounds."
    )
    head = ["way", "tokens", "CPU s", "CPU ms per token", "ratio", "max/min"]
    return f"{table(head, rows)}\n\n{sample_info}\n"


def rollout_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """CPU time per token."""
    ways = numbers["ways"]
    axes.bar(list(ways), [x["ms_per_token"] for x in ways.values()])
    axes.set(ylabel="CPU ms per token")


def scaling_table(numbers: Numbers) -> str:
    """How every cost grows."""
    planning = [
        [
            f"{row['samples']:,}",
            f"{row['ranks']:,}",
            f"{row['ms'] / 1e3:.3f}",
            f"{row['peak_mb']:.0f}",
            f"{row['step']:.4f}",
        ]
        for row in numbers["planning"]
    ]
    step = [
        [f"{row['tokens']:,}", f"{row['cpu_s']:.2f}", f"{1e6 * row['cpu_s'] / row['tokens']:.0f}"]
        for row in numbers["step"]
    ]
    head = [[f"{row['vocabulary']:,}", f"{row['tokens']:,}", f"{row['extra_mb']:.0f}"] for row in numbers["head"]]
    ranks = [[str(row["ranks"]), f"{row['parameters_mb']:.1f}", f"{row['moments_mb']:.1f}"] for row in numbers["ranks"]]
    tables = [
        table(["samples of one plan", "ranks", "CPU s", "peak MB of the process", "lock-step time"], planning),
        table(["tokens of a step", "CPU s", "CPU s per million"], step),
        table(["vocabulary", "loss tokens", "extra MB of the head"], head),
        table(["ranks, fsdp2", "MB of weights on a rank", "MB of moments"], ranks),
    ]
    return "\n\n".join(tables) + "\n"


def scaling_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """Planning time against samples."""
    rows = numbers["planning"]
    axes.plot([row["samples"] for row in rows], [row["ms"] / 1e3 for row in rows], marker="o")
    axes.set(xlabel="samples (and ranks with them)", ylabel="CPU seconds of one plan", xscale="log", yscale="log")


def peers_table(numbers: Numbers) -> str:
    """Plans, differencing and the update step against released packages."""
    planners = ("rlmodule", "rlmodule, free", "verl", "verl, older")
    plans = numbers["plans"]
    rows = [
        [
            row["name"],
            *(f"{row['step'][name]:.3f}" for name in planners),
            *(f"{row['ms'][name]:.1f}" for name in planners),
        ]
        for row in plans
    ]
    medians = [
        f"{ours} over {peer}: {statistics.median(row['step'][ours] / row['step'][peer] for row in plans):.2f}"
        for ours in planners[:2]
        for peer in planners[2:]
    ]
    parts = [
        [
            f"{row['items']} items, {row['parts']} parts, {'equal' if row['equal_size'] else 'free'} sizes",
            *(f"{row['ms'][name]:.2f}" for name in ("rlmodule", "verl")),
            f"{row['ms']['verl'] / row['ms']['rlmodule']:.1f}",
        ]
        for row in numbers["partitions"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    sections = [
        f"Packages: {versions}.",
        table(["lock-step time", *planners, *(f"{name}, ms" for name in planners)], rows),
        f"Medians: {'; '.join(medians)}.",
        table(["largest differencing", "rlmodule, ms", "verl, ms", "ratio"], parts),
        *(update_table(report) for report in numbers["updates"]),
    ]
    return "\n\n".join(sections)


def peers_chart(numbers: Numbers, axes: plt.Axes) -> None:
    """The update step, in multiples of ours."""
    reports = numbers["updates"]
    width = 0.8 / len(reports)
    for i, report in enumerate(reports):
        ratios = [way["update_ratio"] for way in report["ways"].values()]
        axes.bar([x + i * width for x in range(len(ratios))], ratios, width, label=f"V = {report['vocabulary']:,}")
    names = list(reports[0]["ways"])
    axes.set_xticks([x + width * (len(reports) - 1) / 2 for x in range(len(names))], names, rotation=30, ha="right")
    axes.set(ylabel="CPU seconds / ours")
    axes.legend()


SECTIONS: dict[str, tuple[Callable[[Numbers], str], Callable[[Numbers, plt.Axes], None]]] = {
    "planner": (planner_table, planner_chart),
    "update": (update_table, update_chart),
    "update_151936": (update_table, update_chart),
    "memory": (memory_table, memory_chart),
    "loop": (loop_table, loop_chart),
    "rollout": (rollout_table, rollout_chart),
    "scaling": (scaling_table, scaling_chart),
    "peers": (peers_table, peers_chart),
}


def fill(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the two marks of ``name``."""
    before, rest = page.split(START.format(name))
    _, after = rest.split(END.format(name))
    return f"{before}{START.format(name)}\n{text}\n{END.format(name)}{after}"


def measured_on(machine: Numbers) -> str:
    """The line under a table."""
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != '1')}"
    return (
        f"Measured {machine['date']} on {machine['processor']}, {machine['cores']} cores, {threads}, "
        f"torch {machine['torch']}, Python {machine['python']}."
    )


def main() -> None:
    """Draw, and put the tables between their marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "performance.md")
    parser.add_argument("--out", type=Path, help="write the page here instead of in its place")
    args = parser.parse_args()
    page = args.page.read_text()
    for name, (make_table, draw) in SECTIONS.items():
        path = args.results / f"{name}.json"
        if not path.exists():
            continue
        numbers = json.loads(path.read_text())
        figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
        draw(numbers, axes)
        figure.savefig(path.with_suffix(".png"), dpi=80)
        plt.close(figure)
        page = fill(page, name, f"{make_table(numbers)}\n{measured_on(numbers['machine'])}")
    (args.out or args.page).write_text(page)


if __name__ == "__main__":
    main()
