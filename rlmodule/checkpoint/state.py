"""Checkpoint folders: written aside, flushed to disk, described by a manifest, then renamed into place.

A folder counts only if its manifest is intact and every file has the size and the checksum that it lists. All files are
JSON or safetensors, so nothing in a folder can run code. Leaves out what goes into a checkpoint
(``callbacks/checkpoint.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlmodule.core.errors import CheckpointError, in_one_line

MANIFEST = "manifest.json"
STATE_FILE = "state.json"
FORMAT = 2  # of the folder; 1 held pickles
_UNFINISHED = ".writing"
_NAME = re.compile(r"iteration_(\d{6,})(?:\.step_(\d{8,}))?")
_LEFT_OVER = re.compile(_NAME.pattern + r"(\.old)?" + re.escape(_UNFINISHED))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder must hold.

    Args:
        files: name -> (bytes, SHA-256).
        entries: ``step`` (mini-batches seen), iteration, layout and whatever else is worth knowing before loading.
        name: of the folder when it was written; a user may have renamed it since.
    """

    files: Mapping[str, tuple[int, str]]
    entries: Mapping[str, Any]
    name: str

    @property
    def step(self) -> int:
        """Mini-batches seen when it was written."""
        return int(self.entries["step"])


# ---- writing


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    entries: Mapping[str, Any],
    *,
    gather_first_error: Callable[[str | None], str | None] = lambda problem: problem,
    is_rank_zero: bool = True,
) -> str | None:
    """Let all processes of a run fill a folder aside, then put it in the place of ``folder`` in one rename.

    Args:
        folder: where the checkpoint goes; on a file system that all processes see.
        write: writes this process's files; it must not wait for another process.
        entries: for the manifest.
        gather_first_error: the first problem any process has, on every process; by default there is one process.
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
    except Exception as error:  # whatever it is, the other processes have to hear of it
        return in_one_line(error)
    return None


def _finish(aside: Path, folder: Path, entries: Mapping[str, Any]) -> None:
    """Describe what lies aside, flush it, and give it its name."""
    paths = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    files = {path.relative_to(aside).as_posix(): (path.stat().st_size, _checksum(path)) for path in paths}
    manifest = Manifest(files, dict(entries), folder.name)
    (aside / MANIFEST).write_bytes(_sealed({"format": FORMAT, **vars(manifest)}))
    for path in aside.rglob("*"):
        _flush(path)
    _flush(aside)
    _replace(aside, folder)


def _replace(aside: Path, folder: Path) -> None:
    """A folder cannot be renamed over another: the old one steps aside first; a reader never sees half of either."""
    old = folder.with_name(folder.name + ".old" + _UNFINISHED)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sealed(document: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, which end with a checksum of what stands before it."""
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    return json.dumps({**document, "sha256": digest}, indent=1).encode()


# ---- reading


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
        try:
            is_intact = _checksum(path) == digest
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read ({error}). Use an earlier checkpoint") from None
        if not is_intact:
            raise CheckpointError(f"{folder}: {name} is damaged (its checksum differs). Use an earlier checkpoint")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself; no other file is looked at.

    Raises:
        CheckpointError: there is no manifest, it is damaged, or an older version wrote it.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        document = json.loads(content)
        _check_seal(folder, content, document)
        return _manifest_from(document)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: {MANIFEST} is missing, so the checkpoint was never finished. Use an earlier one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: {MANIFEST} cannot be read ({in_one_line(error)}). Use an earlier checkpoint"
        ) from None


def _check_seal(folder: Path, content: bytes, document: Any) -> None:
    """Refuse a manifest that another version wrote, or of which a single bit differs."""
    rest = {name: value for name, value in dict(document).items() if name != "sha256"}
    if len(rest) == len(document) and "files" in rest and "format" not in rest:
        raise CheckpointError(
            f"{folder}: an older version of rlmodule wrote this checkpoint, and this one does not read it. Start anew, "
            "or go on with the version that wrote it"
        )
    if content != _sealed(rest):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged (its checksum differs). Use an earlier checkpoint")
    if rest["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: the checkpoint has format {rest['format']}, this version of rlmodule reads {FORMAT}. Use the "
            "version that wrote it"
        )


def _manifest_from(document: Mapping[str, Any]) -> Manifest:
    files = {name: (int(size), str(digest)) for name, (size, digest) in document["files"].items()}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name} lies outside of the checkpoint")
    entries = dict(document["entries"])
    if type(entries["step"]) is not int or entries["step"] < 0:
        raise ValueError(f"step is {entries['step']!r}")
    return Manifest(files, entries, str(document["name"]))


def folder_of(root: Path, iteration: int, step: int | None = None) -> Path:
    """Where the checkpoint of the first ``iteration`` iterations lives; with ``step`` the next one is under way."""
    return root / (f"iteration_{iteration:06d}" + ("" if step is None else f".step_{step:08d}"))


def newest_whole(root: Path, branches: Sequence[str | None] = (None,)) -> tuple[Path | None, list[str]]:
    """(newest whole checkpoint or None, a line for each newer one that was passed over).

    Args:
        root: folder of the checkpoints.
        branches: one entry for each time the run was started: name of the checkpoint it went on from, None for a start
            from nothing. The newest state of the last branch is the newest: a run that went on from an earlier
            checkpoint beats the higher numbers of the branch it left.
    """
    passed_over: list[str] = []
    newest_first = list(reversed(oldest_first(root)))
    last = len(branches) - 1
    for number in range(last, -1, -1):
        own = [folder for folder in newest_first if min(_branch_of(folder, last), last) == number]
        start = branches[number]
        for folder in [*own, *([root / start] if start else [])]:
            try:
                verify(folder)
            except CheckpointError as error:
                passed_over.append(f"passed over {error}")
            else:
                return folder, passed_over
    return None, passed_over


def _branch_of(folder: Path, otherwise: int) -> int:
    """Number of the start that wrote a checkpoint; ``otherwise`` where its manifest cannot be read."""
    try:
        return int(read_manifest(folder).entries.get("branch", 0))
    except CheckpointError:
        return otherwise


def oldest_first(root: Path) -> list[Path]:
    """The checkpoints below ``root``, whole or not; what is being written, and what a user has renamed, is left out."""
    return sorted((f for f in root.glob("iteration_*") if _NAME.fullmatch(f.name) and not _was_renamed(f)), key=_age)


def _was_renamed(folder: Path) -> bool:
    """Whether the folder was written under another name; one that is damaged was not, for all we know."""
    try:
        return read_manifest(folder).name != folder.name
    except CheckpointError:
        return False


def _age(folder: Path) -> tuple[int, int]:
    """(whole iterations, step within the next one) from a folder's name."""
    found = _NAME.fullmatch(folder.name)
    assert found is not None, f"{folder} is no checkpoint"
    return int(found[1]), int(found[2] or 0)


# ---- which ones stay


def prune(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the last ``keep`` checkpoints up to ``newest`` and the best one, and what interrupted writes left.

    Later ones, which a run resumed from an earlier checkpoint has yet to reach again, are left alone and not counted.
    So is every folder that does not say itself, in a manifest that can be read, that it was written under its name.
    """
    ours = [folder for folder in oldest_first(root) if _age(folder) <= _age(newest) and _is_readable(folder)]
    stay = {*ours[-keep:], best_of(ours)}
    left_over = [path for path in root.glob(f"*{_UNFINISHED}") if _LEFT_OVER.fullmatch(path.name)]
    for folder in [*(f for f in ours if f not in stay), *left_over]:
        shutil.rmtree(folder, ignore_errors=True)


def _is_readable(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


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

    Read from the folders themselves, so a resumed run needs no memory of the runs before it.
    """
    found = {folder: quality for folder in folders if (quality := quality_of(folder)) is not None}
    newest = found.get(folders[-1]) if folders else None
    if newest is None:
        return None
    sign = 1.0 if newest.mode == "max" else -1.0
    values = {
        folder: sign * quality.value
        for folder, quality in found.items()
        if quality.value is not None and (quality.metric, quality.mode) == (newest.metric, newest.mode)
    }
    return max(reversed(values), key=values.__getitem__, default=None)


def quality_of(folder: Path) -> Quality | None:
    """What ranks a checkpoint, None where nothing does."""
    try:
        return Quality(**read_manifest(folder).entries["best"])
    except (CheckpointError, KeyError, TypeError):  # it was never finished, or is not ranked
        return None


# ---- bytes


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
