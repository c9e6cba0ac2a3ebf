"""Where a run writes: one directory for all its processes, found again on resume.

outputs/2026-11-29/15-04-05/
    config.yaml command.txt            what was run
    metrics.jsonl metrics.csv summary.json curves.png train.log tensorboard/ rollouts/
    checkpoints/iteration_000010/      what resumes it
    warm_start/policy/  policy/         Hugging Face folders
    starting_weights.txt                in the place of warm_start/: where several runs have theirs
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlmodule.core.errors import CheckpointError, ConfigError, in_one_line
from rlmodule.records.metrics_log import atomic_write
from rlmodule.records.secrets import mask_arguments

AUTO = "auto"
LONGEST_NAME = 80  # characters of a run's name in that of its directory


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside one run directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def branches(self) -> list[str | None]:
        """For each start of the run: name of the checkpoint it went on from, None for a start from nothing."""
        path = self.root / "branches.json"
        found = read_small(path) if path.exists() else []
        if not isinstance(found, list) or not all(name is None or isinstance(name, str) for name in found):
            raise _damaged(path, "it is no list of checkpoints")
        return found or [None]

    def begin_branch(self, resumed_from: str | None) -> None:
        """Note that the run starts, or goes on from a checkpoint."""
        before = self.branches if resumed_from else []
        with atomic_write(self.root / "branches.json") as aside:
            aside.write_text(json.dumps([*before, resumed_from]))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def warm_start(self) -> Path:
        """The run that made the starting weights."""
        return self.root / "warm_start"

    @property
    def starting_weights(self) -> Path:
        """Says where the starting weights lie that the run shares with others."""
        return self.root / "starting_weights.txt"

    @property
    def policy(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.root / "policy"

    @property
    def summary(self) -> Path:
        """Written when the run has ended."""
        return self.root / "summary.json"


def read_small(path: Path) -> Any:
    """What a run has written into a small file of JSON in its directory.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, in_one_line(error)) from None


def _damaged(path: Path, because: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: it cannot be read ({because}). Delete it, and say which state to go on from: "
        f"resume={path.parent}/checkpoints/iteration_N"
    )


@contextmanager
def locked(run_dir: RunDirectory) -> Iterator[None]:
    """Keep the directory for this process for as long as it lives; works on NFS, and is freed when the process dies.

    Raises:
        ConfigError: another run is writing there; names its host and process.
    """
    run_dir.root.mkdir(parents=True, exist_ok=True)
    with (run_dir.root / "run.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kind that NFS passes on, and forks do not inherit
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            file.seek(0)
            raise ConfigError(
                key="run_dir",
                got=run_dir.root,
                because=f"a run is writing there ({file.read().strip() or 'it does not say which'})",
                fix="Wait for it, end it, or use another run_dir",
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def choose(run_dir: object, output_root: object, resume: object, name: object = None) -> Path:
    """The directory of this run: as told, that of the run to resume, or a new one of date, time and the run's name.

    Raises:
        ConfigError: one of the first three is no path, the directory holds a run, or there is nothing to resume.
        CheckpointError: resume=PATH, and no run has written there.
    """
    for key, value in (("run_dir", run_dir), ("output_root", output_root), ("resume", resume)):
        if not (isinstance(value, str) and value.strip()) and not (value is None and key != "output_root"):
            raise ConfigError(key=key, got=value, because="it must be a path", fix=f"Use {key}=FOLDER")
    root = Path(str(output_root)).absolute()
    if resume is not None and resume != AUTO:
        return _run_of(Path(str(resume)))
    if run_dir is not None:
        path = Path(str(run_dir)).absolute()
        return path if resume == AUTO else _without_a_run(path)
    if resume == AUTO:
        return _newest_unfinished(root)
    behind = "" if name is None else "_" + re.sub(r"[^\w.=,+-]+", "-", str(name))[:LONGEST_NAME]
    return _unused(root / (datetime.now().strftime("%Y-%m-%d/%H-%M-%S") + behind))


def _without_a_run(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError(key="run_dir", got=path, because="it is a file, not a folder", fix="Use run_dir=FOLDER")
    if RunDirectory(path).config.exists():
        raise ConfigError(
            key="run_dir",
            got=path,
            because="a run has written there, and another one would overwrite its metrics and checkpoints",
            fix=f"Use resume={path} to go on with it, or another run_dir",
        )
    return path


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
    """The unfinished run below ``root``, at any depth, that has saved a state most recently."""
    newest: dict[Path, float] = {}
    for manifest in root.glob("**/checkpoints/iteration_*/manifest.json"):
        run = manifest.parents[2]
        newest[run] = max(newest.get(run, 0.0), manifest.stat().st_mtime)
    unfinished = {run: time for run, time in newest.items() if RunDirectory(run).config.exists() and not _finished(run)}
    if not unfinished:
        raise ConfigError(
            key="resume",
            got=AUTO,
            because=f"no unfinished run with a checkpoint lies below {root}",
            fix="Give the run directory itself: resume=PATH or run_dir=PATH",
        )
    return max(unfinished, key=lambda run: (unfinished[run], str(run)))


def _finished(run: Path) -> bool:
    path = run / "summary.json"
    return path.exists() and '"finished": true' in path.read_text(encoding="utf-8", errors="replace")


def _unused(path: Path) -> Path:
    """``path``, or with a number behind it if it exists: two runs may start in the same second."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(1, 1000))]
    return next(c for c in candidates if not c.exists())


def remove_if_unused(run_dir: RunDirectory) -> None:
    """Take away the directory of a run that was refused before it wrote anything of its own.

    The working directory stays: it stands for a run that has no directory of its own, or does not know it yet.
    """
    if run_dir.root.absolute() == Path.cwd():
        return
    if run_dir.root.is_dir() and {path.name for path in run_dir.root.iterdir()} <= {"run.lock"}:
        shutil.rmtree(run_dir.root)


def result(run_dir: RunDirectory) -> float | None:
    """The number that runs are compared by, at the end, for sweeps; None where nothing was measured on held-out rows.

    Mean reward on prompts, or else pair accuracy, or else the loss on demonstrations (of which less is better).
    """
    if not run_dir.summary.exists():
        return None
    summary = json.loads(run_dir.summary.read_text())
    values = (summary.get(name) for name in ("val_reward_end", "val_pair_accuracy_end", "val_loss_end"))
    return next((float(value) for value in values if value is not None), None)


def provenance(arguments: Sequence[str]) -> str:
    """The command and the revision of the code it ran, as a small shell-like text; secrets are masked."""
    command = shlex.join(["python", *mask_arguments(arguments)])
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
