"""A checkpoint from a stranger runs no code: not when it is read, listed, pruned or resumed from. It is refused in words.

Every file is replaced by pickles that would leave a trace, and the manifest is made anew, as anyone could.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rlmodule.callbacks.report import output_paths
from rlmodule.checkpoint.state import (
    MANIFEST,
    STATE_FILE,
    _sealed,
    best_of,
    folder_of,
    newest_whole,
    oldest_first,
    prune,
    verify,
    write_folder,
)
from rlmodule.core.errors import CheckpointError
from rlmodule.records.run_directory import RunDirectory
from tests.helpers.runs import run_small, small_run

pytestmark = pytest.mark.filterwarnings("ignore")

# With samples in it: responses that are kept to be trained on again.
SETTINGS = ("rollout.staleness=1", "algorithm.rollout_correction.mode=truncate", "trainer.max_epochs=3")


class Payload:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def plain_pickle(trace: Path) -> bytes:
    return pickle.dumps(Payload(trace))


def torch_file(trace: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": Payload(trace)}, buffer)
    return buffer.getvalue()


FORMS = (plain_pickle, torch_file)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_small(run_dir, *SETTINGS[:-1], "trainer.max_epochs=2")
    return run_dir


FILES = ("state.json", "state.safetensors", "shards/index.json", "shards/rank_0_0.safetensors")


def test_these_are_all_the_files(finished):
    assert set(verify(folder_of(finished / "checkpoints", 2)).files) == set(FILES)


def forged(finished: Path, run_dir: Path, contents: dict[str, bytes]) -> Path:
    """A copy of the run whose newest checkpoint holds ``contents``, under a manifest that fits."""
    shutil.copytree(finished, run_dir)
    folder = folder_of(run_dir / "checkpoints", 2)
    good = shutil.copytree(folder, run_dir / "good", ignore=shutil.ignore_patterns(MANIFEST))

    def write(aside: Path) -> None:
        shutil.copytree(good, aside, dirs_exist_ok=True)
        for name, content in contents.items():
            (aside / name).write_bytes(content)

    assert write_folder(folder, write, verify(folder).entries) is None
    return folder


def look_at(run_dir: Path) -> None:
    """All that is done with checkpoints without loading one."""
    root = run_dir / "checkpoints"
    newest, passed_over = newest_whole(root)
    assert newest == folder_of(root, 2) and not passed_over, "its checksums are in order"
    best_of(oldest_first(root))
    output_paths(RunDirectory(run_dir))
    prune(root, 9, newest)


def resume(run_dir: Path, folder: Path) -> None:
    small_run(run_dir, *SETTINGS, f"resume={folder}").fit()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "files", [*([name] for name in FILES), FILES], ids=lambda files: files[0] if len(files) == 1 else "all"
)
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(finished, tmp_path, files, form):
    trace = tmp_path / "trace"
    folder = forged(finished, tmp_path / "run", dict.fromkeys(files, form(trace)))
    look_at(tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        resume(tmp_path / "run", folder)
    assert str(caught.value).startswith(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_pickle_in_place_of_the_manifest_is_refused_and_not_run(finished, tmp_path, form):
    trace = tmp_path / "trace"
    folder = forged(finished, tmp_path / "run", {})
    (folder / MANIFEST).write_bytes(form(trace))
    newest, [line] = newest_whole(folder.parent)
    assert newest == folder_of(folder.parent, 1)
    assert f"{folder}: {MANIFEST} cannot be read" in line
    with pytest.raises(CheckpointError, match=f"{MANIFEST} cannot be read"):
        resume(tmp_path / "run", folder)
    assert not trace.exists()


def test_files_that_other_programs_would_load_are_not_opened(finished, tmp_path):
    """Those of older versions, and what Lightning and torch look for."""
    trace = tmp_path / "trace"
    names = ("state.ckpt", "shards/.metadata", "shards/__0_0.distcp", "hpc_ckpt_1.ckpt", "shards/__0.metadata")
    folder = forged(finished, tmp_path / "run", dict.fromkeys(names, plain_pickle(trace)))
    look_at(tmp_path / "run")
    resume(tmp_path / "run", folder)
    assert not trace.exists()


def test_the_payload_would_leave_its_trace(tmp_path):
    """What shows that the tests above can fail."""
    for form, load in (
        (plain_pickle, pickle.loads),
        (torch_file, lambda content: torch.load(io.BytesIO(content), weights_only=False)),
    ):
        trace = tmp_path / form.__name__
        load(form(trace))
        assert trace.exists()


def test_a_manifest_that_leads_out_of_its_folder_is_refused(finished, tmp_path):
    folder = forged(finished, tmp_path / "run", {})
    files = dict(verify(folder).files)

    content = _sealed(
        {"format": 2, "files": {**files, "../../config.yaml": (1, "")}, "entries": {"step": 1}, "name": folder.name}
    )
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match="lies outside of the checkpoint"):
        verify(folder)


def test_a_checkpoint_of_an_older_version_is_refused_in_words(tmp_path):
    """Format 1 had no format in its manifest, and pickles beside it."""
    trace = tmp_path / "trace"
    folder = tmp_path / "run" / "checkpoints" / "iteration_000001"
    (folder / "shards").mkdir(parents=True)
    for name in ("state.ckpt", "shards/.metadata"):
        (folder / name).write_bytes(plain_pickle(trace))
    (folder / MANIFEST).write_text('{"files": {}, "facts": {"step": 4}}')
    with pytest.raises(CheckpointError, match=r"an older version of rlmodule wrote this checkpoint.*Start anew"):
        small_run(tmp_path / "run", f"resume={folder}")
    assert newest_whole(folder.parent)[0] is None
    prune(folder.parent, 1, folder_of(folder.parent, 9))
    assert folder.exists(), "the older version can still use it"
    assert not trace.exists()


def test_a_state_of_the_wrong_kind_is_refused(finished, tmp_path):
    folder = forged(finished, tmp_path / "run", {STATE_FILE: b'["a list"]'})
    with pytest.raises(CheckpointError, match="the state is of type list"):
        resume(tmp_path / "run", folder)
