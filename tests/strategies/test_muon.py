"""Muon under every strategy that keeps matrices: the numbers of one process, and a resumed run is one never stopped."""

from dataclasses import replace

import numpy as np
import pytest

from rlmodule.callbacks.checkpoint import CheckpointConfig, SaveCheckpoints
from rlmodule.checkpoint.state import STATE_FILE, folder_of
from rlmodule.core.errors import CheckpointError
from rlmodule.optim.muon import Muon
from tests.callbacks.builders import context_in
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, check_equal

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

RUN = FixedRun(epochs=2, optimizer=Muon(lr=0.005, adamw_lr=0.002, weight_decay=0.1, warmup_steps=0))
STEPS = 3  # of one epoch
LAYOUTS = {
    "ddp": ("ddp", 2, {}),
    "ddp sequence": ("ddp", 2, {"sp_size": 2}),
    "fsdp2": ("fsdp2", 3, {}),
    "fsdp2 copies": ("fsdp2", 4, {"dp_replicate": 2}),
    "fsdp2 tensor": ("fsdp2", 4, {"tp_size": 2}),
}


@pytest.fixture(scope="module")
def expected():
    return run_on_ranks(1, lambda rank: RUN.fit())[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_process(expected, name):
    backend, world, options = LAYOUTS[name]
    run = RUN.with_options(backend, **options)
    check_equal(expected, run_on_ranks(world, lambda rank: run.fit(world, rank)))


@pytest.mark.parametrize(
    ("writer", "reader", "world"), [("single", "single", 1), ("fsdp2", "fsdp2", 2), ("ddp", "fsdp2", 2)]
)
def test_a_resumed_run_is_one_never_stopped(tmp_path, writer, reader, world):
    def saving(backend):
        save = SaveCheckpoints(CheckpointConfig(keep=9), context_in(tmp_path, iterations=2))
        return replace(RUN.with_options(backend), callbacks=(save,))

    undisturbed = run_on_ranks(world, lambda rank: saving(writer).fit(world, rank))[0]
    checkpoint = folder_of(tmp_path / "checkpoints", 1) / STATE_FILE
    resumed = run_on_ranks(world, lambda rank: replace(RUN.with_options(reader), seed=9).fit(world, rank, checkpoint))[
        0
    ]
    for name, tensor in undisturbed.weights.items():
        if writer == reader:
            assert np.array_equal(resumed.weights[name], tensor), name
        np.testing.assert_allclose(resumed.weights[name], tensor, rtol=0, atol=1e-5, err_msg=name)
    assert resumed.norms == pytest.approx(undisturbed.norms[STEPS:], rel=1e-5)


def test_the_states_of_another_optimizer_are_refused(tmp_path):
    def saved_by_muon(rank):
        save = SaveCheckpoints(CheckpointConfig(keep=9), context_in(tmp_path, iterations=2))
        replace(RUN, callbacks=(save,)).fit()

    run_on_ranks(1, saved_by_muon)
    checkpoint = folder_of(tmp_path / "checkpoints", 1) / STATE_FILE

    def go_on_with_adamw(rank):
        with pytest.raises(CheckpointError, match="another optimizer"):
            FixedRun(epochs=2).fit(ckpt=checkpoint)

    run_on_ranks(1, go_on_with_adamw)
