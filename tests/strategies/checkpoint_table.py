"""Checkpoints between layouts: how far a run that goes on elsewhere is from one that never stopped.

``python -m tests.strategies.checkpoint_table [LAYOUT ...] [--json FILE]`` with names of layouts of ``command=parity``;
all of ``LAYOUTS`` without names. A layout writes a checkpoint after three of six optimizer steps; each layout takes the
other three from it. The number is the largest difference of a weight tensor after the last step, relative to its norm;
0 is bit for bit. Layouts whose package is missing are left out. Leaves out what a checkpoint holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmodule.checkpoint.state import STATE_FILE, folder_of
from rlmodule.core.errors import RLModuleError
from rlmodule.parity.layouts import ParityLayout, chosen
from strategies.registry import STRATEGIES
from tests.helpers.backends import import_once
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, Outcome, relative_difference, saving

LAYOUTS = ("single", "ddp_2", "fsdp_2", "fsdp2_2", "fsdp2_tp2", "deepspeed_1", "deepspeed_3")
OF_OTHERS = (
    *("torchtitan_2", "torchtitan_tp2", "torchtitan_2_tp2", "automodel_2", "automodel_tp2", "veomni_2"),
    *("megatron_2", "megatron_2_shared", "megatron_tp2_pp2"),
)
RUN = FixedRun(epochs=2)


def run_of(layout: ParityLayout) -> FixedRun:
    """Six steps on fixed samples under a layout."""
    return RUN.with_options(layout.backend, **layout.options)


def written(layout: ParityLayout, root: Path) -> Outcome:
    """Take all six steps, with a checkpoint after the third and the sixth below ``root``."""
    return _on_ranks(layout, saving(root, run_of(layout)), None)


def gone_on(layout: ParityLayout, root: Path) -> Outcome:
    """Take the last three steps from the first checkpoint below ``root``; starts with other weights."""
    return _on_ranks(layout, replace(run_of(layout), seed=99), folder_of(root / "checkpoints", 1) / STATE_FILE)


def _on_ranks(layout: ParityLayout, run: FixedRun, checkpoint: Path | None) -> Outcome:
    world = layout.processes
    found: list[Outcome] = run_on_ranks(world, lambda rank: run.fit(world, rank, checkpoint))
    return found[0]


def is_installed(layout: ParityLayout) -> bool:
    """Whether its strategy can be chosen here."""
    try:
        STRATEGIES.lookup("language_model", layout.backend, device="cpu")
    except RLModuleError as error:
        print(f"{layout.name}: left out, {error}", file=sys.stderr)
        return False
    return True


def measure(names: Sequence[str], say: Callable[[str], object]) -> dict[str, dict[str, float]]:
    """Writer -> reader -> difference."""
    layouts = [layout for layout in chosen(names) if layout.name in names and is_installed(layout)]
    for backend in {layout.backend for layout in layouts}:
        import_once(backend)
    table: dict[str, dict[str, float]] = {}
    for writer in layouts:
        with tempfile.TemporaryDirectory() as folder:
            undisturbed = written(writer, Path(folder))
            table[writer.name] = {}
            for reader in layouts:
                difference = relative_difference(undisturbed, gone_on(reader, Path(folder)))
                table[writer.name][reader.name] = difference
                say(f"{writer.name} -> {reader.name}: {difference:.1e}")
    return table


def markdown(table: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each writer, a column for each reader."""
    readers = list(table)
    lines = ["| from \\ to | " + " | ".join(readers) + " |", "|---" * (len(readers) + 1) + "|"]
    for writer, row in table.items():
        cells = ["0" if row[reader] == 0 else f"{row[reader]:.0e}" for reader in readers]
        lines.append(f"| {writer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layouts", nargs="*", default=[*LAYOUTS, *OF_OTHERS])
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    table = measure(options.layouts, lambda line: print(line, file=sys.stderr, flush=True))
    print(markdown(table))
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
