"""A process finds its place from what a cluster says, and says in words what contradicts itself."""

from __future__ import annotations

import os

import pytest

from rlmodule.core.errors import ConfigError
from rlmodule.run.launchers.parts.place import (
    SUPERVISOR,
    ProcessPlace,
    check_meeting_point,
    place_of_process,
    process_rank,
    without_place,
)

MEETING = {"MASTER_ADDR": "host-0", "MASTER_PORT": "23456"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables where none are."""
    for name in os.environ.keys() - without_place(os.environ).keys():
        monkeypatch.delenv(name)

    def set_to(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_machine_and_place_on_it_follow_from_the_rank(environment, num_processes):
    """All that Kubeflow's training operator sets; the law is that no two ranks share a place."""
    places = set()
    for rank in range(4):
        environment({"RANK": str(rank), "WORLD_SIZE": "4", **MEETING})
        place = place_of_process(num_processes, 4 // num_processes)
        assert place.rank == process_rank() == rank == place.node_rank * num_processes + place.local_rank
        assert place.local_rank < num_processes
        places.add((place.node_rank, place.local_rank))
    assert len(places) == 4
    check_meeting_point()


def test_the_places_of_a_launcher_are_read_as_they_were_written(environment):
    for rank in range(6):
        written = ProcessPlace.of_rank(rank, 2, 3)
        environment(written.variables(supervisor=os.getpid()))
        assert place_of_process(2, 3) == written
        assert process_rank() == rank


def test_variables_of_a_batch_job_are_not_those_of_the_ranks_inside_of_it(environment):
    """sbatch with one task, whose script starts train.py with trainer.devices=2."""
    environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"})
    assert place_of_process(2, 1) == ProcessPlace(), "nobody has started its ranks yet"
    environment(ProcessPlace(1, 2, 1, 0).variables(supervisor=os.getpid()))
    assert place_of_process(2, 1) == ProcessPlace(1, 2, 1, 0)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, (3, 1, 1)),  # torchrun
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", **STEP}, (2, 0, 1)),  # srun
        ({"SLURM_PROCID": "1", **STEP}, (1, 1, 0)),  # srun of an old SLURM
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "1", **STEP}, (3, 1, 1)),  # a launcher inside of a step
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 0, 0)),  # an operator with one replica
    ],
)
def test_every_cluster_s_words(environment, variables, place):
    environment(variables)
    found = place_of_process(2, 2)
    assert (found.rank, found.local_rank, found.node_rank) == place


@pytest.mark.parametrize(
    ("variables", "key", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3"}, "trainer.devices", "WORLD_SIZE=3 processes were started from outside"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, "trainer.devices", "SLURM_NTASKS=8"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK", "numbered from 0 to 3"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK", "must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK", "must be a whole number"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE", "must be a whole number"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "LOCAL_RANK", "makes it 1"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}, "NODE_RANK", "makes it 0"),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "2", **STEP}, "SLURM_LOCALID", "trainer.devices=2 makes it 0"),
        ({"RANK": "1"}, "RANK", "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE", "RANK is not set"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, "WORLD_SIZE", "(not set)"),
    ],
)
def test_what_contradicts_itself_is_said(environment, variables, key, says):
    environment(variables)
    with pytest.raises(ConfigError) as caught:
        place_of_process(2, 2)
    assert caught.value.key == key
    assert says in str(caught.value)


@pytest.mark.parametrize("missing", MEETING)
def test_ranks_that_cannot_find_each_other_are_told_why(environment, missing):
    environment({"RANK": "1", "WORLD_SIZE": "4", **MEETING})
    environment({missing: ""})
    with pytest.raises(ConfigError, match=f"^{missing}=.*one of 4 processes"):
        check_meeting_point()


def test_a_process_of_its_own_is_told_of_no_peers():
    told = {**ProcessPlace(1, 2, 1).variables(7), **MEETING, "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x", "A": "b"}
    assert SUPERVISOR in told
    assert without_place(told) == {"A": "b"}
