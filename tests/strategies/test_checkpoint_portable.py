"""A run saved under one strategy goes on under any other: bit for bit on the same one, within rounding elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlmodule.callbacks.checkpoint import CheckpointSettings, SaveCheckpoints
from rlmodule.checkpoint.state import STATE_FILE, folder_of, verify
from tests.callbacks.builders import context_in
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import FixedRun, Outcome, relative_difference

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

RUN = FixedRun(epochs=2)
STEPS = 3  # of one epoch


def saving(root: Path, run: FixedRun) -> FixedRun:
    return replace(
        run, callbacks=(SaveCheckpoints(CheckpointSettings(keep=9), context_in(root, iterations=run.epochs)),)
    )


def fit(run: FixedRun, world_size: int, root: Path | None = None, resume: Path | None = None) -> Outcome:
    """On forked ranks, also for a world of one: a process group would outlive the test."""
    made = run if root is None else saving(root, run)
    ckpt = None if resume is None else folder_of(resume / "checkpoints", 1) / STATE_FILE
    return run_on_ranks(world_size, lambda rank: made.fit(world_size, rank, ckpt))[0]


WRITERS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, {}),
    "fsdp": (2, {}),
    "deepspeed1": (2, {"stage": 1}),
    "deepspeed3": (2, {"stage": 3}),
}


def run_of(label: str) -> FixedRun:
    return RUN.with_options(label.rstrip("123") if label.startswith("deepspeed") else label, **WRITERS[label][1])


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, tuple[Path, Outcome]]:
    """Each strategy's undisturbed run of two epochs, with a checkpoint after each."""
    made = {}
    for label, (world, _) in WRITERS.items():
        root = tmp_path_factory.mktemp(label)
        made[label] = (root, fit(run_of(label), world, root))
    return made


@pytest.mark.parametrize("label", WRITERS)
def test_the_same_world_goes_on_bit_for_bit(written, label):
    root, undisturbed = written[label]
    resumed = fit(replace(run_of(label), seed=99), WRITERS[label][0], resume=root)
    assert resumed.norms == undisturbed.norms[STEPS:]
    assert [m["actor/loss"] for m in resumed.metrics] == [m["actor/loss"] for m in undisturbed.metrics[STEPS:]]
    for name, tensor in undisturbed.weights.items():
        assert np.array_equal(resumed.weights[name], tensor), name


@pytest.mark.parametrize(
    ("writer", "reader", "world"),
    [
        ("ddp", "fsdp2", 4),
        ("fsdp2", "single", 1),
        ("fsdp2", "deepspeed3", 2),
        ("deepspeed3", "fsdp", 2),
        ("deepspeed1", "ddp", 2),
        ("fsdp", "deepspeed1", 3),
    ],
)
def test_ckpt_06_another_strategy_and_world_goes_on_within_rounding(written, writer, reader, world):
    root, undisturbed = written[writer]
    resumed = fit(replace(run_of(reader), seed=99), world, resume=root)
    assert resumed.norms == pytest.approx(undisturbed.norms[STEPS:], rel=1e-5)
    assert relative_difference(undisturbed, resumed) < 1e-5


def test_ckpt_06_weights_and_moments_are_those_of_a_run_that_never_stopped(written):
    import torch.distributed.checkpoint as dcp

    states = {}
    for label, (root, _) in written.items():
        shards = folder_of(root / "checkpoints", 1) / "shards"
        known = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
        state = {key: torch.empty(meta.size) for key, meta in known.items()}
        dcp.load(state, checkpoint_id=shards, no_dist=True)
        states[label] = state
    for label, state in states.items():
        assert state.keys() == states["single"].keys(), label
        for key, tensor in state.items():
            assert torch.allclose(tensor, states["single"][key], rtol=1e-4, atol=1e-6), (label, key)
        assert {k.split("@")[1] for k in state if "@" in k} == {"step", "exp_avg", "exp_avg_sq"}


def test_without_the_moments_a_resumed_run_differs(written, monkeypatch):
    """What shows that the tests above can fail."""
    from strategies.parts.inner_models import InnerModels

    root, undisturbed = written["ddp"]
    monkeypatch.setattr(InnerModels, "put_loaded", lambda self, name, optimizer, parts: optimizer.state.clear())
    resumed = fit(run_of("ddp"), 2, resume=root)
    assert relative_difference(undisturbed, resumed) > 1e-4


def test_a_manifest_lists_every_rank_s_shards(written):
    folder = folder_of(written["fsdp2"][0] / "checkpoints", 2)
    manifest = verify(folder)
    assert {"shards/__0_0.distcp", "shards/__1_0.distcp", "shards/.metadata", STATE_FILE} <= set(manifest.files)
    assert json.loads((folder / "manifest.json").read_text())["facts"]["layout"]["world_size"] == 2
