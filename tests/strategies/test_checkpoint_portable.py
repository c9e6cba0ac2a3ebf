"""A run saved under one strategy goes on under any other: bit for bit on the same one, within rounding elsewhere."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from rlmodule.checkpoint.state import STATE_FILE, folder_of, verify
from rlmodule.core.errors import CheckpointError
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from strategies.parts import snapshot
from strategies.parts.saved_state import check_same_optimizer
from strategies.parts.shards import read_whole
from tests.helpers.ranks import run_on_ranks
from tests.strategies.fixed_runs import ADAMW, ARCHITECTURE, FixedRun, Outcome, relative_difference, saving

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

RUN = FixedRun(epochs=2)
STEPS = 3  # of one epoch


def fit(run: FixedRun, world_size: int, root: Path | None = None, resume: Path | None = None) -> Outcome:
    """On forked ranks, also for a world of one: a process group would outlive the test."""
    made = run if root is None else saving(root, run)
    ckpt = None if resume is None else folder_of(resume / "checkpoints", 1) / STATE_FILE
    return run_on_ranks(world_size, lambda rank: made.fit(world_size, rank, ckpt))[0]


WRITERS = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, {}),
    "fsdp2-stages": (2, {"pp_size": 2}),
    "fsdp": (2, {}),
    "deepspeed1": (2, {"stage": 1}),
    "deepspeed3": (2, {"stage": 3}),
}


def run_of(label: str) -> FixedRun:
    backend = label.rstrip("123") if label.startswith("deepspeed") else label.partition("-")[0]
    return RUN.with_options(backend, **WRITERS[label][1])


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
        ("fsdp2-stages", "single", 1),
        ("fsdp2-stages", "fsdp2", 4),
        ("single", "fsdp2-stages", 4),
        ("ddp", "fsdp2-stages", 2),
    ],
)
def test_ckpt_06_another_strategy_and_world_goes_on_within_rounding(written, writer, reader, world):
    root, undisturbed = written[writer]
    resumed = fit(replace(run_of(reader), seed=99), world, resume=root)
    assert resumed.norms == pytest.approx(undisturbed.norms[STEPS:], rel=1e-5)
    assert relative_difference(undisturbed, resumed) < 1e-5


def state_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    return read_whole(folder / "shards")


def test_ckpt_06_weights_and_moments_are_those_of_a_run_that_never_stopped(written):
    states = {label: state_in(folder_of(root / "checkpoints", 1)) for label, (root, _) in written.items()}
    for label, state in states.items():
        assert state.keys() == states["single"].keys(), label
        for key, tensor in state.items():
            assert torch.allclose(tensor, states["single"][key], rtol=1e-4, atol=1e-6), (label, key)
        assert {k.split("@")[1] for k in state if "@" in k} == {"step", "exp_avg", "exp_avg_sq"}


def test_without_the_moments_a_resumed_run_differs(written, monkeypatch):
    """What shows that the tests above can fail."""
    from strategies.parts.strategy_mixin import StrategyMixin

    root, undisturbed = written["ddp"]
    monkeypatch.setattr(StrategyMixin, "load_state_dict", lambda self, name, optimizer, parts: optimizer.state.clear())
    resumed = fit(run_of("ddp"), 2, resume=root)
    assert relative_difference(undisturbed, resumed) > 1e-4


class HoldBack(L.Callback):
    """Shards of the first checkpoint are not written before the run has taken another step."""

    def __init__(self) -> None:
        self.has_gone_on = threading.Event()
        self.was_waited_for: list[bool] = []

    def on_train_start(self, *_: Any) -> None:
        write = snapshot.write_shards

        def held(*args: Any) -> None:
            self.was_waited_for.append(self.has_gone_on.wait(60))
            write(*args)

        snapshot.write_shards = held  # in a forked rank of its own

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if module.counters.steps > STEPS:
            self.has_gone_on.set()


@pytest.mark.parametrize("label", WRITERS)
def test_training_goes_on_while_a_checkpoint_is_written_which_holds_the_moment_it_was_taken(written, tmp_path, label):
    """Under every strategy; a resume from it is bit for bit that of one written at once."""
    root, undisturbed = written[label]
    hold = HoldBack()
    run = saving(tmp_path, run_of(label), async_save=True)
    run = replace(run, callbacks=(*run.callbacks, hold), timer=lambda *_: hold.was_waited_for)
    outcome = fit(run, WRITERS[label][0])
    assert outcome.extra == [True, True], "of both checkpoints, the second at the end of the run"
    assert outcome.norms == undisturbed.norms
    for name in ("checkpoints", *(f"checkpoints/iteration_00000{i}" for i in (1, 2))):
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == sorted(p.name for p in (root / name).iterdir())
    got, expected = (state_in(folder_of(place / "checkpoints", 1)) for place in (tmp_path, root))
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key
    verify(folder_of(tmp_path / "checkpoints", 1))
    resumed = fit(replace(run_of(label), seed=99), WRITERS[label][0], resume=tmp_path)
    assert resumed.norms == undisturbed.norms[STEPS:]


def test_a_manifest_lists_every_rank_s_shards(written):
    folder = folder_of(written["fsdp2"][0] / "checkpoints", 2)
    manifest = verify(folder)
    shards = {"shards/rank_0_0.safetensors", "shards/rank_1_0.safetensors", "shards/index.json"}
    assert {*shards, STATE_FILE, "state.safetensors"} == set(manifest.files)
    assert json.loads((folder / "manifest.json").read_text())["entries"]["layout"]["world_size"] == 2


def with_a_spare_layer(run: FixedRun) -> FixedRun:
    """A model with weights that no token reaches, as those of an expert that was never chosen."""
    config = ModelConfig(architecture=ARCHITECTURE, tokenizer="byte")
    policy = build_policy(config, seed=run.seed, temperature=1.0)
    policy.spare = torch.nn.Linear(4, 4)
    return replace(run, policy=policy)


@pytest.mark.parametrize("label", ["single", "fsdp2", "fsdp"])
def test_weights_that_no_token_reaches_cost_the_others_no_moments(tmp_path, label):
    undisturbed = fit(with_a_spare_layer(run_of(label)), WRITERS[label][0], tmp_path)
    resumed = fit(with_a_spare_layer(run_of(label)), WRITERS[label][0], resume=tmp_path)
    assert resumed.norms == undisturbed.norms[STEPS:]
    for name, tensor in undisturbed.weights.items():
        assert np.array_equal(resumed.weights[name], tensor), name


def settings_of(trainer: L.Trainer, module: Any) -> list[tuple[float, tuple[float, float], float]]:
    [optimizer] = trainer.optimizers
    return [(group["weight_decay"], group["betas"], group["eps"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("label", ["single", "fsdp2-stages"])
def test_settings_of_the_optimizer_are_those_of_the_run_that_goes_on(written, label):
    other = replace(ADAMW, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    run = replace(run_of(label), optimizer=other, timer=settings_of)
    resumed = fit(run, WRITERS[label][0], resume=written[label][0])
    assert resumed.extra == [(0.3, (0.8, 0.9), 1e-6), (0.0, (0.8, 0.9), 1e-6)]


def test_moments_of_8_bits_are_refused_where_others_would_have_8_bits():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": list(layer.parameters()), "eight_bit_from": 4096}])
    check_same_optimizer(Path("run"), "policy", optimizer, [{"eight_bit_from": 4096}])
    with pytest.raises(CheckpointError, match="same eight_bit_from"):
        check_same_optimizer(Path("run"), "policy", optimizer, [{"eight_bit_from": 2048}])
