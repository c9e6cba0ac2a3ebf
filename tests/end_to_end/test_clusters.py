"""A run is the same run whoever started its processes: a cluster's variables alone, or srun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest

from rlmodule.checkpoint.state import newest_whole, verify
from rlmodule.records.metrics_log import read_records
from rlmodule.run.launchers.parts.supervision import PREEMPTED
from tests.end_to_end.commands import ENVIRONMENT, PATIENCE, SCRIPT, Command, forked, typed
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, SMALL, numbers, rollouts, run_small

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The run directory of the same run on one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run_small(run_dir)
    return run_dir


def sampled(run_dir):
    """What was asked and answered, in order."""
    rows = [row for of_iteration in rollouts(run_dir).values() for row in of_iteration]
    return [(row["sample_id"], row["prompt"], row["response_ids"], row["reward"]) for row in rows]


def assert_same_run(got, expected):
    """One run, written once: the same tokens, and the numbers of every step and iteration to 1e-5."""
    assert sampled(got) == sampled(expected)
    without = (*MADE_OF_TIME, *MADE_OF_THE_LAYOUT)
    here, there = (numbers(read_records(path / "metrics.jsonl"), without=without) for path in (got, expected))
    assert [record[:2] for record in here] == [record[:2] for record in there]
    for (_, step, mine), (*_, theirs) in zip(here, there, strict=True):
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-7, err_msg=f"{name} at {step}")
    assert [path.name for path in (got / "checkpoints").iterdir()] == [
        path.name for path in (expected / "checkpoints").iterdir()
    ]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def kubeflow(rank):
    """What its training operator sets in the two pods of a PyTorchJob: one process in each."""
    return {"RANK": str(rank)}, ["trainer.num_nodes=2"]


def srun(rank):
    """What SLURM sets in the two tasks of ``srun --ntasks-per-node=2``, and what a shell before it left behind."""
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "127.0.0.1"}
    return {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}, ["trainer.devices=2"]


@pytest.mark.parametrize("cluster", [kubeflow, srun])
def test_two_processes_that_a_cluster_starts_are_one_run(one_process, tmp_path, monkeypatch, cluster):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if cluster is kubeflow:
        meeting["WORLD_SIZE"] = "2"
    ranks = []
    for rank in range(2):
        variables, settings = cluster(rank)
        for name, value in (meeting | variables).items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / str(rank)  # one output file each
        folder.mkdir()
        # Each has a directory of its own in mind; the first one's holds for both.
        ranks.append(Command([*SMALL, *settings, f"run_dir={folder / 'run'}", "strategy=ddp"], folder))
    for finished in [rank.wait() for rank in ranks]:
        assert finished.code == 0, finished.text
    assert_same_run(tmp_path / "0" / "run", one_process)
    assert not (tmp_path / "1" / "run").exists()


def test_half_of_a_cluster_s_variables_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = forked(*SMALL, f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.code == 2
    assert done.text.startswith("error: RANK=1: it says that this is one of several processes")
    assert not (tmp_path / "run").exists()


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'rlmodule[ray]'")


@pytest.mark.backends
@pytest.mark.timeout(900)  # seconds; a cluster of processes starts before the run does
@needs_ray
def test_ranks_on_two_machines_of_a_ray_cluster_are_one_run(one_process, tmp_path):
    """Both machines are this one; they meet at an address and a port, as others would."""
    settings = (*SMALL, "launcher=ray", "trainer.num_nodes=2", f"run_dir={tmp_path / 'run'}")
    done = typed(*settings, cwd=tmp_path, patience=3 * PATIENCE)
    assert done.code == 0, done.text
    assert "ddp on 2 cpu processes" in done.text, "rank 0 is heard"
    assert_same_run(tmp_path / "run", one_process)


@pytest.mark.backends
@pytest.mark.timeout(900)  # seconds; a cluster of processes starts before the run does
@needs_ray
def test_a_signal_to_who_started_a_run_on_ray_saves_its_state_and_ends_with_75(tmp_path):
    """It is sent after the first of many steps, to the process that was typed, which is none of the ranks."""
    run_dir = tmp_path / "run"
    settings = (*SMALL, "launcher=ray", "trainer.devices=2", "trainer.max_epochs=500", f"run_dir={run_dir}")
    with (tmp_path / "output.txt").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *settings], env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while (
            not (run_dir / "metrics.jsonl").exists() or '"kind": "step"' not in (run_dir / "metrics.jsonl").read_text()
        ):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == PREEMPTED
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "output.txt").read_text()
    assert "asked to stop" in said
    folder, passed_over = newest_whole(run_dir / "checkpoints")
    assert folder is not None and not passed_over, said
    assert verify(folder).entries["step"] >= 1
