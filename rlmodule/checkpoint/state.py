"""Checkpoint folders: written aside, flushed to disk, described by a manifest, then renamed into place.

A folder counts only when its manifest is there and every file has the size and the checksum it lists. Leaves out what
goes into a checkpoint (``callbacks/checkpoint.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmodule.core.errors import CheckpointError

MANIFEST = "manifest.json"
STATE_FILE = "state.ckpt"
_UNFINISHED = ".writing"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder must hold.

    Args:
        files: name -> (bytes, SHA-256).
        entries: step, iteration, layout and whatever else a reader wants to know before loading.
    """

    files: Mapping[str, tuple[int, str]]
    entries: Mapping[str, Any]


def write_folder(folder: Path, write: Callable[[Path], None], entries: Mapping[str, Any]) -> Manifest:
    """Let ``write`` fill a folder aside, then put it in the place of ``folder`` in one rename.

    Raises:
        OSError: the disk is full or the place cannot be written; ``folder`` is untouched and nothing is left behind.
    """
    aside = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        return _finish(aside, folder, entries)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _finish(aside: Path, folder: Path, entries: Mapping[str, Any]) -> Manifest:
    files = {
        str(p.relative_to(aside)): (p.stat().st_size, _checksum(p)) for p in sorted(aside.rglob("*")) if p.is_file()
    }
    manifest = Manifest(files, dict(entries))
    (aside / MANIFEST).write_text(json.dumps({"files": files, "entries": manifest.entries}, indent=1))
    for path in aside.rglob("*"):
        _flush(path)
    _flush(aside)
    _replace(aside, folder)
    return manifest


def write_folder_together(
    folder: Path,
    write: Callable[[Path], None],
    entries: Mapping[str, Any],
    *,
    gather_first_error: Callable[[str | None], str | None],
    is_rank_zero: bool,
) -> str | None:
    """``write_folder`` by all processes of a run: each fills its part of the folder aside, the first finishes it.

    Args:
        folder: where the checkpoint goes; on a file system that all processes see.
        write: writes this process's files.
        entries: for the manifest.
        gather_first_error: the first problem any process has, on every process.
        is_rank_zero: whether this process makes the manifest and renames.

    Returns:
        None, or what went wrong, the same on every process; ``folder`` is untouched then and nothing is left behind.
    """
    aside = folder.with_name(folder.name + _UNFINISHED)

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        _finish(aside, folder, entries)

    for everyone, stage in ((False, begin), (True, lambda: write(aside)), (False, finish)):
        problem = gather_first_error(_attempt(stage) if everyone or is_rank_zero else None)
        if problem is not None:
            if is_rank_zero:
                shutil.rmtree(aside, ignore_errors=True)
            return problem
    return None


def _attempt(stage: Callable[[], None]) -> str | None:
    try:
        stage()
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return None


def _replace(aside: Path, folder: Path) -> None:
    """A folder cannot be renamed over another: the old one steps aside first; a reader never sees half of either."""
    old = folder.with_name(folder.name + ".old" + _UNFINISHED)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def verify(folder: Path) -> Manifest:
    """The manifest of a whole checkpoint.

    Raises:
        CheckpointError: names the first thing that is missing or damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such checkpoint folder. Give a run directory or one of its checkpoints"
        )
    manifest = read_manifest(folder)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing. Use an earlier checkpoint")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder}: {name} has {path.stat().st_size} bytes instead of {size}. Use an earlier checkpoint"
            )
        if _checksum(path) != digest:
            raise CheckpointError(f"{folder}: {name} is damaged (its checksum differs). Use an earlier checkpoint")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself; no file is looked at.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        read = json.loads((folder / MANIFEST).read_text())
        return Manifest(
            {name: (int(size), str(digest)) for name, (size, digest) in read["files"].items()}, read["entries"]
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: {MANIFEST} is missing, so the checkpoint was never finished. Use an earlier one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} cannot be read ({error}). Use an earlier one") from None


def folder_of(root: Path, iteration: int, step: int | None = None) -> Path:
    """Where the checkpoint of the first ``iteration`` iterations lives; with ``step`` the next one is under way."""
    return root / (f"iteration_{iteration:06d}" + ("" if step is None else f".step_{step:08d}"))


def newest_whole(root: Path) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint or None, a line for each newer one that was passed over)."""
    passed_over: list[str] = []
    for folder in reversed(oldest_first(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            passed_over.append(f"passed over {error}")
        else:
            return folder, passed_over
    return None, passed_over


def prune(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the last ``keep`` checkpoints up to ``newest`` and the best one, and what interrupted writes left.

    Later ones, which a run resumed from an earlier checkpoint has yet to reach again, are left alone and not counted.
    """
    finished = [folder for folder in oldest_first(root) if _age(folder) <= _age(newest)]
    stay = {*finished[-keep:], best_of(finished)}
    for folder in [*(f for f in finished if f not in stay), *root.glob(f"*{_UNFINISHED}")]:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Quality:
    """How good the state in a checkpoint is, as its manifest has it.

    Args:
        metric: name as in ``metrics.jsonl``.
        mode: whether ``max`` or ``min`` is good.
        value: None where the metric was not taken at this step, or is no number.
    """

    metric: str
    mode: str
    value: float | None


def best_of(folders: Sequence[Path]) -> Path | None:
    """The best checkpoint by the metric of the last one, the later of equals; None where none has a value of it.

    Asked of the folders themselves, so a resumed run needs no memory of the runs before it.
    """
    found = {folder: quality for folder in folders if (quality := _quality_of(folder)) is not None}
    asked = found.get(folders[-1]) if folders else None
    if asked is None:
        return None
    sign = 1.0 if asked.mode == "max" else -1.0
    values = {
        folder: sign * quality.value
        for folder, quality in found.items()
        if quality.value is not None and (quality.metric, quality.mode) == (asked.metric, asked.mode)
    }
    return max(reversed(values), key=values.__getitem__, default=None)


def _quality_of(folder: Path) -> Quality | None:
    try:
        return Quality(**read_manifest(folder).entries["best"])
    except (CheckpointError, KeyError, TypeError):  # it was never finished, or is not ranked
        return None


def oldest_first(root: Path) -> list[Path]:
    """The checkpoints below ``root``, whole or not; what is being written is left out."""
    return sorted((f for f in root.glob("iteration_*") if not f.name.endswith(_UNFINISHED)), key=_age)


def _age(folder: Path) -> tuple[int, int]:
    """(whole iterations, step within the next one) from a folder's name."""
    digits, _, step = folder.name.removeprefix("iteration_").partition(".step_")
    return int(digits) if digits.isdigit() else -1, int(step) if step.isdigit() else 0


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
