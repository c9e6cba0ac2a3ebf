"""Where a run writes: one directory for all its processes, found again on resume.

outputs/2026-11-29/15-04-05/
    config.yaml command.txt            what was run
    metrics.jsonl metrics.csv summary.json curves.png train.log tensorboard/ rollouts/
    checkpoints/iteration_000010/      what resumes it
    warm_start/policy/  policy/         Hugging Face folders
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlmodule.core.errors import CheckpointError, ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside one run directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def warm_start(self) -> Path:
        """The run that made the starting weights."""
        return self.root / "warm_start"

    @property
    def policy(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.root / "policy"

    @property
    def summary(self) -> Path:
        """Written when the run has ended."""
        return self.root / "summary.json"


def choose(run_dir: str | None, output_root: str, resume: str | None) -> Path:
    """The directory of this run: the one given, that of the run to resume, or a new one named by date and time.

    Raises:
        ConfigError: resume=auto, and there is nothing to resume.
        CheckpointError: resume=PATH, and there is no such path.
    """
    if resume and resume != AUTO:
        return _run_of(Path(resume))
    if run_dir:
        return Path(run_dir).absolute()
    root = Path(output_root).absolute()
    if resume == AUTO:
        return _newest_unfinished(root)
    return _unused(root / datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))


def _run_of(path: Path) -> Path:
    """The run directory that ``path`` is, or that holds the checkpoint ``path``."""
    if not path.exists():
        raise CheckpointError(
            f"resume={path}: there is nothing there. Give a run directory or one of its checkpoint folders"
        )
    path = path.absolute()
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    if not RunDirectory(run).config.exists():
        raise CheckpointError(
            f"resume={path}: no run has written there. Give a run directory or one of its checkpoints"
        )
    return run


def _newest_unfinished(root: Path) -> Path:
    runs = [p.parents[1] for p in root.glob("*/*/checkpoints/iteration_*")]
    unfinished = {run for run in runs if not _finished(run)}
    if not unfinished:
        raise ConfigError(
            key="resume",
            got=AUTO,
            because=f"no unfinished run with a checkpoint lies below {root}",
            fix="Give the run directory itself: resume=PATH or run_dir=PATH",
        )
    return max(unfinished, key=lambda run: (run.stat().st_mtime, str(run)))


def _finished(run: Path) -> bool:
    return '"finished": true' in ((run / "summary.json").read_text() if (run / "summary.json").exists() else "")


def _unused(path: Path) -> Path:
    """``path``, or with a number behind it if it exists: two runs may start in the same second."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(1, 1000))]
    return next(c for c in candidates if not c.exists())


def remove_if_unused(run_dir: RunDirectory) -> None:
    """Remove the directory of a run that was refused before it wrote anything."""
    if run_dir.root.is_dir() and {path.name for path in run_dir.root.iterdir()} <= {".hydra"}:
        shutil.rmtree(run_dir.root)


def provenance(arguments: Sequence[str]) -> str:
    """The command line, working directory, commit and Python version of a run, one line each."""
    command = shlex.join(["python", *arguments])
    return f"command: {command}\ncwd: {Path.cwd()}\ngit: {git_revision()}\npython: {sys.version.split()[0]}\n"


def git_revision() -> str:
    """Commit of the code, with ``+changes`` when files differ from it; ``unknown`` outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
