"""Lightning is told which process this is, and guesses nothing from the variables of a job around it."""

from __future__ import annotations

import os

import lightning as L
import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from rlmodule.run.build.distributed import cluster_of
from rlmodule.run.build.machine import Machine
from rlmodule.run.launchers.parts.place import ProcessPlace, without_place
from rlmodule.run.trainer_config import TrainerConfig
from strategies.registry import STRATEGIES

# ``sbatch --ntasks=1``, whose script runs ``python train.py trainer.devices=2``
BATCH = {
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "77",
}


@pytest.fixture
def batch_job(monkeypatch):
    for name in os.environ.keys() - without_place(os.environ).keys():
        monkeypatch.delenv(name)
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    assert SLURMEnvironment.detect(), "Lightning would take this process for a task of the job"


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_ranks_of_our_own_inside_a_batch_job_are_not_its_tasks(batch_job, monkeypatch, rank):
    for name, value in ProcessPlace.of_rank(rank, 2, 2).variables(os.getpid()).items():
        monkeypatch.setenv(name, value)
    machine = Machine(TrainerConfig(devices="2", num_nodes=2, accelerator="cpu"))
    cls = STRATEGIES.lookup("language_model", "ddp", device="cpu")
    strategy = cls(cls.config_class(), device="cpu", num_processes=2, num_nodes=2)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, plugins=[cluster_of(machine)], logger=False
    )
    place = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
    assert place == (rank, rank % 2, rank // 2, 4)
    trainer.strategy.cluster_environment.validate_settings(num_devices=2, num_nodes=2)


def test_a_process_alone_inside_a_batch_job_is_alone(batch_job):
    assert not isinstance(cluster_of(Machine(TrainerConfig(accelerator="cpu"))), SLURMEnvironment)
