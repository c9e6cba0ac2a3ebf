"""A checkpoint folder is whole or does not count: written aside, listed with checksums, put in place by one rename."""

import json
from pathlib import Path

import pytest

from rlmodule.checkpoint import state
from rlmodule.checkpoint.state import MANIFEST, STATE_FILE, folder_of, newest_whole, prune, verify, write_folder
from rlmodule.core.errors import CheckpointError


def save(root, iteration, content="weights", **entries):
    folder = folder_of(root, iteration)

    def write(aside):
        (aside / STATE_FILE).write_text(content)
        (aside / "shards").mkdir()
        (aside / "shards" / "rank_0").write_text(content * 3)

    assert write_folder(folder, write, {"step": 4 * iteration, **entries}) is None
    return folder


def test_a_saved_folder_verifies_and_tells_its_facts(tmp_path):
    folder = save(tmp_path, 3, world_size=2)
    assert folder.name == "iteration_000003"
    manifest = verify(folder)
    assert manifest.entries == {"step": 12, "world_size": 2}
    assert set(manifest.files) == {STATE_FILE, "shards/rank_0"}
    assert manifest.files[STATE_FILE][0] == len("weights")
    assert [p.name for p in tmp_path.iterdir()] == [folder.name], "nothing else is left"


def test_saving_again_replaces_the_whole_folder(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "stray").write_text("x")
    save(tmp_path, 1, content="newer")
    assert (folder / STATE_FILE).read_text() == "newer"
    assert not (folder / "stray").exists()
    verify(folder)


def test_a_write_that_fails_leaves_everything_as_it_was(tmp_path):
    folder = save(tmp_path, 1)

    def fail(aside):
        (aside / STATE_FILE).write_text("half")
        raise OSError("no space left")

    assert write_folder(folder, fail, {"step": 4}) == "OSError: no space left"
    assert (folder / STATE_FILE).read_text() == "weights"
    verify(folder)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    folder, rename = save(tmp_path, 1), Path.rename

    def fail(path, target):
        if path.name == "iteration_000001.writing":
            raise OSError("input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert write_folder(folder, lambda aside: None, {"step": 4}) == "OSError: input/output error"
    assert (folder / STATE_FILE).read_text() == "weights"
    verify(folder)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def break_file(folder):
    (folder / STATE_FILE).write_text("wEights")


def cut_file(folder):
    (folder / STATE_FILE).write_text("weigh")


def remove_file(folder):
    (folder / "shards" / "rank_0").unlink()


def remove_manifest(folder):
    (folder / MANIFEST).unlink()


def cut_manifest(folder):
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-9])


def empty_manifest(folder):
    (folder / MANIFEST).write_text("{}")


DAMAGE = {
    break_file: f"{STATE_FILE} is damaged",
    cut_file: f"{STATE_FILE} has 5 bytes instead of 7",
    remove_file: "shards/rank_0 is missing",
    remove_manifest: f"{MANIFEST} is missing",
    cut_manifest: f"{MANIFEST} cannot be read",
    empty_manifest: f"{MANIFEST} is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_it_is_taken(tmp_path, damage):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    with pytest.raises(CheckpointError) as caught:
        verify(bad)
    assert str(caught.value).startswith(f"{bad}: {DAMAGE[damage]}")
    found, passed_over = newest_whole(tmp_path)
    assert found == good
    assert passed_over == [f"passed over {caught.value}"]


def test_point_17_every_bit_of_the_manifest_counts(tmp_path):
    """A wrong ``step`` would cut metrics, a wrong checksum would let a damaged file pass."""
    folder = save(tmp_path, 1, config={"optimizer.lr": 1e-4, "seed": 0, "name": "naïve"}, best=None)
    content = (folder / MANIFEST).read_bytes()
    verify(folder)
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=MANIFEST):
            verify(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\n",
        lambda text: text.replace("  ", " "),
        lambda text: text.replace('"step": 4', '"step": 5'),
    ],
)
def test_point_17_a_manifest_that_was_edited_is_refused(tmp_path, change):
    folder = save(tmp_path, 1)
    text = (folder / MANIFEST).read_text()
    assert change(text) != text
    (folder / MANIFEST).write_text(change(text))
    with pytest.raises(CheckpointError, match="is damaged"):
        verify(folder)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [MANIFEST, STATE_FILE])
def test_a_folder_in_place_of_a_file_is_refused(tmp_path, name):
    folder = save(tmp_path, 1)
    replace_by_folder(folder / name)
    with pytest.raises(CheckpointError, match=name):
        verify(folder)


def test_a_manifest_of_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FORMAT", 3)
    folder = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format 3, this version of rlmodule reads 2\. Use the version"):
        verify(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such checkpoint folder"):
        verify(tmp_path / "iteration_000009")


def test_the_newest_is_the_one_with_the_highest_number(tmp_path):
    for iteration in (9, 10, 2, 1_000_000):
        save(tmp_path, iteration)
    assert newest_whole(tmp_path) == (tmp_path / "iteration_1000000", [])


def test_nothing_to_resume_is_no_error(tmp_path):
    assert newest_whole(tmp_path / "absent") == (None, [])
    (tmp_path / "iteration_000001.writing").mkdir()
    assert newest_whole(tmp_path) == (None, []), "what was being written does not count"


def test_pruning_keeps_the_newest_and_clears_what_was_interrupted(tmp_path):
    folders = [save(tmp_path, i) for i in range(1, 6)]
    (tmp_path / "iteration_000006.writing").mkdir()
    (tmp_path / "iteration_000004.old.writing").mkdir()
    prune(tmp_path, keep=2, newest=folders[-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration_000004", "iteration_000005"]


RENAMED = (
    "best",
    "iteration_000002_good",
    "iteration_000002.old",
    "iteration_good",
    "iteration_000000",
    "good.writing",
)


@pytest.mark.parametrize("name", RENAMED)
def test_a_checkpoint_that_the_user_renamed_is_never_pruned_and_never_chosen(tmp_path, name):
    """Issue 10, point 4: asked for by its name it is as good as any."""
    save(tmp_path, 2).rename(tmp_path / name)
    for iteration in range(3, 9):
        prune(tmp_path, keep=1, newest=save(tmp_path, iteration))
    assert {p.name for p in tmp_path.iterdir()} == {name, "iteration_000008"}
    assert verify(tmp_path / name).step == 8
    folder_of(tmp_path, 8).rename(tmp_path / "iteration_000099")
    assert newest_whole(tmp_path) == (None, [])


def test_pruning_leaves_alone_what_does_not_say_that_it_is_a_checkpoint(tmp_path):
    for name in ("iteration_000001", "iteration_000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    remove_manifest(save(tmp_path, 3))
    prune(tmp_path, keep=1, newest=save(tmp_path, 9))
    assert len(list(tmp_path.iterdir())) == 4


def test_pruning_leaves_later_checkpoints_of_a_run_that_went_back_alone(tmp_path):
    folders = [save(tmp_path, i) for i in range(1, 6)]
    prune(tmp_path, keep=1, newest=folders[2])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"iteration_00000{i}" for i in (3, 4, 5)]


def save_with(root, iteration, value, metric="val/accuracy", mode="max"):
    return save(root, iteration, best={"metric": metric, "mode": mode, "value": value})


VALUES = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.7, 6: 0.6}


@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 1)])
def test_the_best_checkpoint_stays_beside_the_newest_and_the_later_of_equals_is_the_best(tmp_path, mode, best):
    """Folder by folder, as a run saves them; what ranks them is in the folders alone."""
    for iteration, value in VALUES.items():
        prune(tmp_path, keep=1, newest=save_with(tmp_path, iteration, value, mode=mode))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"iteration_00000{best}", "iteration_000006"]


def test_values_of_another_metric_do_not_count(tmp_path):
    save_with(tmp_path, 1, 99.0, metric="reward/mean")
    save_with(tmp_path, 2, 0.1)
    save(tmp_path, 3)  # by a run that ranks nothing
    newest = save_with(tmp_path, 4, None)
    prune(tmp_path, keep=1, newest=newest)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration_000002", "iteration_000004"]
    prune(tmp_path, keep=1, newest=save(tmp_path, 5))
    assert [p.name for p in tmp_path.iterdir()] == ["iteration_000005"]


def test_facts_are_plain_json(tmp_path):
    folder = save(tmp_path, 1, layout={"dp": 2})
    assert json.loads((folder / MANIFEST).read_text())["entries"] == {"step": 4, "layout": {"dp": 2}}


def test_the_branch_that_was_resumed_last_wins_over_higher_numbers_of_the_one_it_left(tmp_path):
    """Iterations 1 to 4, resumed from 1, crashed in 3: the newest state is 2 of the new branch, not 4 of the old."""

    def written(iteration, branch):
        folder = folder_of(tmp_path, iteration)
        write_folder(folder, lambda aside: (aside / "x").write_text("x"), {"step": iteration, "branch": branch})
        return folder

    old = [written(iteration, 0) for iteration in (1, 2, 3, 4)]
    assert newest_whole(tmp_path, [None]) == (old[3], [])
    assert newest_whole(tmp_path, [None, old[0].name]) == (old[0], []), "nothing of the new branch is saved yet"
    new = written(2, 1)
    assert newest_whole(tmp_path, [None, old[0].name]) == (new, [])
    assert newest_whole(tmp_path, [None, old[0].name, old[3].name]) == (old[3], []), "resumed from the old one again"
