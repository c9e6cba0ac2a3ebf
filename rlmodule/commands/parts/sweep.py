"""How the jobs of a sweep ended: each leaves a file behind, and a table at the end shows them all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

JOB_FILE = "job.json"


@dataclass(frozen=True)
class JobResult:
    """One job of a sweep.

    Args:
        number: of the job.
        overrides: what sets it apart from the others.
        code: exit code that the job would have had by itself; 0 for a job that finished.
        result: the number that a sweeper compares, None where there is none.
        problem: what was wrong; empty for a job that finished.
    """

    number: int
    overrides: list[str]
    code: int = 0
    result: float | None = None
    problem: str = ""

    def save(self, folder: Path) -> None:
        """Leave it in the job's directory, where another process can find it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_jobs(sweep_dir: Path) -> list[JobResult]:
    """Every job that ended, by number."""
    found = [JobResult(**json.loads(path.read_text(encoding="utf-8"))) for path in sweep_dir.glob(f"*/{JOB_FILE}")]
    return sorted(found, key=lambda job: job.number)


def show_jobs(jobs: Sequence[JobResult], sweep_dir: Path, console: Console | None = None) -> int:
    """Print the table; returns the exit code of the first job that failed, or 0."""
    table = Table(title=f"{len(jobs)} jobs in {sweep_dir}")
    table.add_column("job", justify="right")
    table.add_column("settings")
    table.add_column("result")
    for job in jobs:
        shown = job.problem if job.code else "finished" if job.result is None else f"{job.result:.4g}"
        table.add_row(
            str(job.number), escape(" ".join(job.overrides)), escape(shown), style="red" if job.code else None
        )
    (console or Console()).print(table)
    return next((job.code for job in jobs if job.code), 0)
