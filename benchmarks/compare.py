"""Final held-out accuracy of every algorithm on every environment, from the TensorBoard files of a sweep.

python train.py -m experiment=compare
python benchmarks/compare.py outputs/sweeps/DATE/TIME [MORE ...]

Writes the table of docs/algorithms.md and its chart. Of several sweeps a later one's runs take the place of an earlier
one's with the same algorithm, environment and seed, so a sweep that was interrupted can be finished by another.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import record
import yaml
from report import HERE, fill, measured_on, plt, table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmodule.commands.parts.sweep import JOB_FILE

DOCS = HERE.parent / "docs"
ACCURACY = "val/reward/mean"  # of environments whose rewards are 0 or 1
Final = dict[str, dict[str, list[float]]]  # algorithm -> environment -> accuracy at the end, by seed


@dataclass(frozen=True)
class Run:
    """One finished run of a sweep.

    Args:
        algorithm, environment: words of the menus.
        seed: of the run.
        budget: iterations and samples, in words.
        threads: it computed with; "the machine's" where its settings leave that open.
        start, end: held-out accuracy before the first update and after the last.
    """

    algorithm: str
    environment: str
    seed: int
    budget: str
    threads: str
    start: float
    end: float


def read_run(folder: Path) -> Run | None:
    """One run directory; None where the run did not end."""
    summary = folder / "summary.json"
    if not summary.exists() or not json.loads(summary.read_text())["finished"]:
        return None
    overrides = json.loads((folder / JOB_FILE).read_text())["overrides"]
    choices = dict(override.split("=", 1) for override in overrides)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    accuracy = [event.value for event in events.Scalars(ACCURACY)]
    prompts, n = config["algorithm"]["train_batch_size"], config["rollout"]["n"]
    budget = f"{config['trainer']['max_epochs']} iterations of {prompts} prompts x {n} responses"
    threads = str(config["trainer"]["num_threads"] or "the machine's")
    return Run(choices["algorithm"], choices["environment"], config["seed"], budget, threads, accuracy[0], accuracy[-1])


def read_sweeps(folders: Iterable[Path]) -> list[Run]:
    """The finished runs of all sweeps, one per algorithm, environment and seed; says which runs were passed over."""
    found: dict[tuple[str, str, int], Run] = {}
    for folder in folders:
        for job in sorted(path for path in folder.iterdir() if path.is_dir()):
            run = read_run(job)
            if run is None:
                print(f"passed over {job}: the run did not end")
            else:
                found[run.algorithm, run.environment, run.seed] = run
    return list(found.values())


def by_algorithm(runs: Iterable[Run]) -> Final:
    """Accuracies at the end, by algorithm and environment."""
    final: Final = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run.seed):
        final[run.algorithm][run.environment].append(run.end)
    return final


def ranked(final: Final) -> list[str]:
    """Algorithms, best mean over all runs first."""
    return sorted(final, key=lambda name: -statistics.mean(x for values in final[name].values() for x in values))


def comparison_table(runs: list[Run]) -> str:
    """Mean of the seeds with the least and the greatest, by environment; and what all runs had in common."""
    environments, final = sorted({run.environment for run in runs}), by_algorithm(runs)
    start: Mapping[str, list[float]] = {e: [r.start for r in runs if r.environment == e] for e in environments}
    rows = [["(start)", *(spread(start[e]) for e in environments)]]
    rows += [[f"`{name}`", *(spread(final[name][e]) for e in environments)] for name in ranked(final)]
    seeds = sorted({run.seed for run in runs})
    budgets = ", ".join(sorted({run.budget for run in runs}))
    note = f"{len(runs)} runs: seeds {', '.join(map(str, seeds))}, {budgets}. Mean (least to greatest) over seeds."
    return f"{table(['`algorithm=`', *environments], rows)}\n\n{note}\n"


def spread(values: list[float]) -> str:
    """Mean, and between which values."""
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(runs: list[Run], path: Path) -> None:
    """Every run as a point, every mean as a bar, one panel for each environment."""
    environments, final = sorted({run.environment for run in runs}), by_algorithm(runs)
    names = ranked(final)[::-1]
    figure, panels = plt.subplots(
        1,
        len(environments),
        figsize=(4.5 * len(environments), 1 + 0.25 * len(names)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, environment in zip(panels[0], environments, strict=True):
        for place, name in enumerate(names):
            values = final[name][environment]
            axes.barh(place, statistics.mean(values) if values else 0.0, height=0.6, color="#9ecae1")
            axes.plot(values, [place] * len(values), linestyle="", marker="o", markersize=3, color="#08519c")
        axes.set(title=environment, xlabel="held-out accuracy at the end", xlim=(0, 1))
        axes.set_yticks(range(len(names)), names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    """Fill the table and draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders that hold one run directory per job")
    parser.add_argument("--page", type=Path, default=DOCS / "algorithms.md")
    parser.add_argument("--out", type=Path, help="write the page here instead of in its place")
    parser.add_argument("--chart", type=Path, default=DOCS / "img" / "compare.png")
    args = parser.parse_args()
    runs = read_sweeps(args.sweeps)
    if not runs:
        parser.error("no run of these sweeps has ended")
    machine = record.machine() | {"threads": " or ".join(sorted({run.threads for run in runs}))}
    text = f"{comparison_table(runs)}\n{measured_on(machine)}\n\n![Every run as a point](img/{args.chart.name})"
    (args.out or args.page).write_text(fill(args.page.read_text(), "compare", text))
    draw(runs, args.chart)


if __name__ == "__main__":
    main()
