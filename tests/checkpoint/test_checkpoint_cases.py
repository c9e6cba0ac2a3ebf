"""Shared bug cases of checkpoints, ids in the tests' names: half-written, disk full, position after several resumes.

The folder format by itself is in ``checkpoint/test_state.py``, kill -9 of a whole run in ``end_to_end/test_resume.py``.
There is no pointer file: the newest whole folder is the newest checkpoint. CKPT-07 needs adapters, which are not offered.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import time
from functools import partial

import numpy as np
import pytest

from rlmodule.checkpoint.state import STATE_FILE, folder_of, newest_whole, verify, write_folder
from rlmodule.core.errors import CheckpointError
from rlmodule.data.stream import PromptStream
from rlmodule.records.metrics_log import read_records
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, rollouts, run_small, small_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three iterations that keeps all its checkpoints."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return run_dir, run_small(run_dir, "trainer.max_epochs=3", "callbacks.checkpoint.keep=9")


@pytest.fixture
def copy_of(finished, tmp_path):
    """The same run to do harm to."""
    return shutil.copytree(finished[0], tmp_path / "run")


# ---- CKPT-01


def save(root, iteration, megabytes=1.0):
    block = bytes([iteration]) * int(megabytes * 2**20 / 4)

    def write(aside):
        for shard in range(4):
            (aside / f"shard_{shard}").write_bytes(block)

    assert write_folder(folder_of(root, iteration), write, {"iteration": iteration, "step": iteration}) is None


def test_ckpt_01_a_truncated_checkpoint_is_passed_over_and_replaced_by_the_next_save(tmp_path):
    """Step 20 is whole, of step 30 one file is cut: resume takes 20 and says why; asking for 30 is an error."""
    for iteration in (20, 30):
        save(tmp_path, iteration)
    broken = folder_of(tmp_path, 30)
    (broken / "shard_2").write_bytes(b"\x1e" * 100)
    found, passed_over = newest_whole(tmp_path)
    assert found == folder_of(tmp_path, 20)
    [line] = passed_over
    assert "iteration_000030" in line
    assert "shard_2 has 100 bytes instead of 262144" in line
    with pytest.raises(CheckpointError, match="shard_2 has 100 bytes"):
        verify(broken)
    save(tmp_path, 30)
    assert newest_whole(tmp_path) == (broken, [])


def test_ckpt_01_a_run_resumes_from_the_checkpoint_before_the_broken_one(finished, copy_of, capsys):
    """And ends with the numbers of the run that was never interrupted."""
    broken = folder_of(copy_of / "checkpoints", 2)
    shutil.rmtree(folder_of(copy_of / "checkpoints", 3))
    state = broken / STATE_FILE
    state.write_bytes(state.read_bytes()[:-1000])
    records = run_small(copy_of, "trainer.max_epochs=3", f"resume={copy_of}")
    assert capsys.readouterr().out.count(f"resume: passed over {broken}: {STATE_FILE} has") == 1
    assert numbers(records) == numbers(finished[1])
    verify(broken)


def test_ckpt_01_asking_for_the_broken_one_is_an_error(copy_of):
    broken = folder_of(copy_of / "checkpoints", 2)
    (broken / STATE_FILE).unlink()
    with pytest.raises(CheckpointError) as caught:
        small_run(copy_of, "trainer.max_epochs=3", f"resume={broken}")
    assert f"{broken}: {STATE_FILE} is missing" in str(caught.value)


def keep_saving(root, started):
    started.set()
    for _ in range(1000):
        save(root, 2, megabytes=2)


def test_ckpt_01_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """Twenty kills, spread over the time of one save and the rename of the next."""
    context = multiprocessing.get_context("fork")
    save(tmp_path, 1)
    begin = time.perf_counter()
    save(tmp_path, 2, megabytes=2)
    one_save = time.perf_counter() - begin
    for attempt in range(20):
        started = context.Event()
        process = context.Process(target=keep_saving, args=(tmp_path, started))
        process.start()
        started.wait()
        time.sleep(one_save * (0.3 + attempt / 10))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found, passed_over = newest_whole(tmp_path)
        assert found is not None
        assert passed_over == [], "a folder under its own name is whole"
        verify(found)
    save(tmp_path, 2)
    assert newest_whole(tmp_path) == (folder_of(tmp_path, 2), [])


# ---- CKPT-03


def fill_the_disk(rank, run_dir, devices):
    """Go on for one iteration in a world where no file may grow past 30 KB, which a checkpoint alone does."""
    no_rollouts = "callbacks.samples.every_n_iterations=99"
    devices = f"trainer.devices={devices}"
    run = small_run(run_dir, "trainer.max_epochs=4", devices, no_rollouts, f"resume={run_dir}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        run.fit()
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_ckpt_03_a_full_disk_leaves_the_checkpoint_before_it_and_ends_every_rank(copy_of, world_size):
    before = {path: path.read_bytes() for path in (copy_of / "checkpoints").rglob("*") if path.is_file()}
    for text in run_on_ranks(world_size, partial(fill_the_disk, run_dir=copy_of, devices=world_size)):
        assert text.startswith(f"{folder_of(copy_of / 'checkpoints', 4)}: the checkpoint could not be written (")
        assert "free some space" in text
    after = {path: path.read_bytes() for path in (copy_of / "checkpoints").rglob("*") if path.is_file()}
    assert after == before, "earlier checkpoints are untouched, and nothing half written is left"
    assert newest_whole(copy_of / "checkpoints") == (folder_of(copy_of / "checkpoints", 3), [])


# ---- another model


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2)])
def test_t2a_25_another_rank_of_the_adapters_is_refused_with_the_key(tmp_path, first, second):
    """T2A-25."""
    run_dir = tmp_path / "run"
    run_small(run_dir, f"model.lora.r={first}")
    with pytest.raises(
        CheckpointError, match=rf"It was written with model\.lora\.r={first}; resume with that"
    ) as caught:
        run_small(run_dir, f"model.lora.r={second}", "trainer.max_epochs=3", f"resume={run_dir}")
    assert f"is [{first}, 16] there and [{second}, 16] here" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.architecture.num_hidden_layers=2", "it has no policy."),
        ("model.architecture.intermediate_size=8", "[16, 16] there and [8, 16] here"),
        ("model.lora.r=2", "it has no policy."),
    ],
)
def test_the_weights_of_another_model_are_refused(copy_of, setting, says):
    with pytest.raises(CheckpointError, match="It was written for another model; start anew, or use its own") as caught:
        run_small(copy_of, setting, "trainer.max_epochs=4", f"resume={copy_of}")
    assert says in str(caught.value)


# ---- CKPT-04


def test_ckpt_04_the_position_counts_from_the_start_of_the_run():
    """12 rows, a resume, 5 rows, a resume: the next is row 17."""
    whole = PromptStream(100, seed=0).take(30)
    seen, state = [], None
    for count in (12, 5, 13):
        stream = PromptStream(100, seed=0)
        if state is not None:
            stream.load_state_dict(state)
        seen += stream.take(count)
        state = stream.state_dict()
    assert [counter for counter, _ in seen][17] == 17
    assert seen == whole


def test_ckpt_04_a_run_resumed_twice_sees_the_rows_of_a_run_never_stopped(finished, tmp_path):
    """The same prompts in the same order, the same sampled tokens, the same numbers bit for bit."""
    run_dir = tmp_path / "run"
    run_small(run_dir, "trainer.max_epochs=1")
    run_small(run_dir, "trainer.max_epochs=2", f"resume={run_dir}")
    records = run_small(run_dir, "trainer.max_epochs=3", f"resume={run_dir}")
    assert rollouts(run_dir) == rollouts(finished[0])
    steps = [r for r in records if r.kind != "validation"]  # the parts validate at their ends, the whole does not
    assert numbers(steps) == numbers([r for r in finished[1] if r.kind != "validation"])
    ids = [row["sample_id"] for rows in rollouts(run_dir).values() for row in rows]
    assert ids == list(range(48)), "no sample twice, none left out"


# ---- the best


def kept(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_best_checkpoint_stays_and_a_resumed_run_still_knows_it(tmp_path):
    """By a metric of every iteration; three runs of one directory keep what one run would have kept."""
    ranked = ("callbacks.checkpoint.keep=1", "callbacks.checkpoint.best_metric=reward/mean")
    run_dir = tmp_path / "run"
    for iterations in (1, 3, 6):
        resumed = [f"resume={run_dir}"] if run_dir.exists() else []
        records = run_small(run_dir, f"trainer.max_epochs={iterations}", *ranked, *resumed)
        values = {r.iteration: r.metrics["reward/mean"] for r in records if r.kind == "iteration"}
        best = max(values, key=lambda i: (values[i], i))
        assert kept(run_dir) == sorted({f"iteration_{i:06d}" for i in (best, iterations)})
    assert best < iterations, "otherwise nothing was shown"
    quality = verify(folder_of(run_dir / "checkpoints", best)).entries["best"]
    assert quality == {"metric": "reward/mean", "mode": "max", "value": values[best]}


def test_a_misspelt_metric_is_said_once(tmp_path):
    with pytest.warns(UserWarning, match="best_metric=reward/maen: no such metric is logged.*reward/mean") as caught:
        run_small(tmp_path / "run", "trainer.max_epochs=2", "callbacks.checkpoint.best_metric=reward/maen")
    assert len([w for w in caught if "best_metric" in str(w.message)]) == 1


def test_held_out_accuracy_at_the_end_ranks_the_last_checkpoint_too(finished):
    folders = [verify(folder).entries for folder in sorted((finished[0] / "checkpoints").iterdir())]
    assert [entries["best"]["value"] is None for entries in folders] == [True, True, False]
    assert folders[-1]["layout"] == {
        "world_size": 1,
        "dp_size": 1,
        "sp_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "cp_size": 1,
    }
    assert folders[-1]["config"]["optimizer.lr"] == 1e-2


# ---- CKPT-06, for strategies whose checkpoints hold the whole state


def go_on(rank, run_dir, devices):
    return run_small(run_dir, "trainer.max_epochs=3", f"trainer.devices={devices}", f"resume={run_dir}")


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ckpt_06_a_run_goes_on_on_another_number_of_ranks(finished, copy_of, world_size):
    """Weights, both moments and the position in the data go on: the rows and numbers of one process to 1e-5."""
    for iteration in (2, 3):
        shutil.rmtree(folder_of(copy_of / "checkpoints", iteration))
    run_on_ranks(world_size, partial(go_on, run_dir=copy_of, devices=world_size))
    got, expected = rollouts(copy_of), rollouts(finished[0])
    for name, rows in expected.items():
        assert [(r["sample_id"], r["prompt"], r["response_ids"]) for r in got[name]] == [
            (r["sample_id"], r["prompt"], r["response_ids"]) for r in rows
        ]
    differ = MADE_OF_TIME + MADE_OF_THE_LAYOUT
    here, there = numbers(read_records(copy_of / "metrics.jsonl"), without=differ), numbers(finished[1], without=differ)
    assert [(kind, step) for kind, step, _ in here] == [(kind, step) for kind, step, _ in there]
    for (_, _, mine), (_, _, theirs) in zip(here, there, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_run_that_is_compared_does_train(finished):
    """Otherwise equal numbers would say little."""
    steps = [r.metrics for r in finished[1] if r.kind == "step"]
    assert sum(step["actor/grad_norm"] > 0 for step in steps) >= 4
    assert len({step["actor/pg_loss"] for step in steps}) == len(steps)
