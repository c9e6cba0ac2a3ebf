"""One directory per run, found again on resume; what is refused leaves nothing behind."""

# Shared cases: T2B-06.
import os
import subprocess
import sys
from datetime import datetime

import pytest

from rlmodule.core.errors import CheckpointError, ConfigError
from rlmodule.records.run_directory import RunDirectory, choose, git_revision, provenance, remove_if_unused


def a_run(root, name, *, finished=False, iterations=(1,), age=0):
    """A run directory as a run leaves it; ``age`` in seconds."""
    run, stamp = root / name, datetime.now().timestamp() - age
    for iteration in iterations:
        folder = run / "checkpoints" / f"iteration_{iteration:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        os.utime(folder / "manifest.json", (stamp, stamp))
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "summary.json").write_text('{\n  "finished": %s\n}' % ("true" if finished else "false"))
    return run


def test_a_new_run_is_named_by_date_and_time(tmp_path):
    before = datetime.now()
    path = choose(None, str(tmp_path), None)
    named = datetime.strptime("/".join(path.parts[-2:]), "%Y-%m-%d/%H-%M-%S")
    assert before.replace(microsecond=0) <= named <= datetime.now()
    assert path.parents[1] == tmp_path
    assert not path.exists(), "choosing makes nothing"


def test_two_runs_of_one_second_do_not_share_a_directory(tmp_path):
    taken = [choose(None, str(tmp_path), None)]
    for _ in range(5):
        taken[-1].mkdir(parents=True)
        taken.append(choose(None, str(tmp_path), None))
    assert len(set(taken)) == 6


def test_a_run_directory_that_is_given_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose("mine", "outputs", None) == tmp_path / "mine"
    assert choose("mine", "outputs", "auto") == tmp_path / "mine", "resume=auto looks inside it"


def test_auto_finds_the_newest_unfinished_run(tmp_path):
    a_run(tmp_path / "2026-01-01", "09-00-00", age=300)
    wanted = a_run(tmp_path / "2026-01-01", "10-00-00", age=200)
    a_run(tmp_path / "2026-01-02", "11-00-00", age=100, finished=True)
    a_run(tmp_path / "2026-01-02", "12-00-00", age=50, iterations=())
    assert choose(None, str(tmp_path), "auto") == wanted


def test_auto_goes_by_the_time_of_the_last_state_not_by_that_of_the_directory(tmp_path):
    """Point 17 of the faults found on 2026-11-30: reading an older run made it the newest."""
    older = a_run(tmp_path / "2026-01-01", "09-00-00", age=300)
    wanted = a_run(tmp_path / "2026-01-01", "10-00-00", age=200)
    (older / "notes.txt").write_text("looked at it")
    os.utime(older)
    assert choose(None, str(tmp_path), "auto") == wanted


def test_auto_finds_unfinished_runs_at_every_depth(tmp_path):
    a_run(tmp_path, "mine", age=300)
    wanted = a_run(tmp_path / "sweeps" / "2026-01-01" / "09-00-00", "3", age=10)
    assert choose(None, str(tmp_path), "auto") == wanted


def test_t2b_06_a_directory_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path):
    run = a_run(tmp_path, "exp")
    with pytest.raises(ConfigError, match=f"run_dir={run}: a run has written there.*resume={run}"):
        choose(str(run), str(tmp_path), None)
    assert choose(str(run), str(tmp_path), "auto") == run
    assert choose(None, str(tmp_path), str(run)) == run


@pytest.mark.parametrize(
    ("key", "paths"),
    [("output_root", (None, None, None)), ("resume", (None, "outputs", 5)), ("run_dir", (["a"], "outputs", None))],
)
def test_what_is_no_path_is_refused_by_its_key(key, paths):
    with pytest.raises(ConfigError, match=f"{key}=.*: it must be a path"):
        choose(*paths)


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*: it is a file, not a folder"):
        choose(str(tmp_path / "file"), str(tmp_path), None)


def test_auto_takes_a_run_that_was_killed_before_it_wrote_a_summary(tmp_path):
    wanted = a_run(tmp_path / "2026-01-01", "10-00-00")
    (wanted / "summary.json").unlink()
    assert choose(None, str(tmp_path), "auto") == wanted


def test_auto_with_nothing_to_resume_is_refused(tmp_path):
    a_run(tmp_path / "2026-01-01", "10-00-00", finished=True)
    with pytest.raises(ConfigError) as caught:
        choose(None, str(tmp_path), "auto")
    assert (caught.value.key, caught.value.got) == ("resume", "auto")
    assert str(tmp_path) in str(caught.value)


def test_a_run_is_found_from_itself_and_from_its_checkpoint(tmp_path):
    run = a_run(tmp_path, "mine", iterations=(1, 2))
    (run / "config.yaml").touch()
    assert choose(None, "elsewhere", str(run)) == run
    assert choose(None, "elsewhere", str(run / "checkpoints" / "iteration_000002")) == run
    assert choose("other", "elsewhere", str(run)) == run, "a resumed run goes on where it was"


def test_resuming_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is nothing there"):
        choose(None, str(tmp_path), str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="no run has written there"):
        choose(None, str(tmp_path), str(tmp_path))


def test_places_inside(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.config == tmp_path / "config.yaml"
    assert run.checkpoints == tmp_path / "checkpoints"
    assert run.warm_start == tmp_path / "warm_start"
    assert run.policy == tmp_path / "policy"
    assert run.summary == tmp_path / "summary.json"


def test_only_a_directory_without_anything_of_the_run_is_taken_away(tmp_path):
    unused, used = tmp_path / "unused", tmp_path / "used"
    for run in (unused, used):
        run.mkdir(parents=True)
        (run / "run.lock").touch()
    (used / "config.yaml").write_text("seed: 0")
    for run in (unused, used, tmp_path / "absent"):
        remove_if_unused(RunDirectory(run))
    assert not unused.exists()
    assert (used / "config.yaml").exists()


def test_what_was_run_can_be_run_again():
    text = provenance(["train.py", "seed=1", "data.system_prompt=be brief"])
    assert "command: python train.py seed=1 'data.system_prompt=be brief'\n" in text
    assert f"cwd: {os.getcwd()}\n" in text
    assert f"git: {git_revision()}\n" in text


def test_the_revision_is_a_commit_or_unknown():
    commit = git_revision().removesuffix("+changes")
    assert commit == "unknown" or (len(commit) == 40 and int(commit, 16) >= 0)


def test_choosing_needs_no_library():
    """Every process of a run imports it before anything else."""
    heavy = (
        "[m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'omegaconf', 'lightning', 'transformers')]"
    )
    code = f"import sys, rlmodule.records.run_directory, rlmodule.run.launchers.local; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
