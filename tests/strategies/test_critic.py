"""PPO gives the numbers of one process under every strategy: rollouts, values, advantages, both models' updates.

Whole runs of a tiny model, with a value model of its own and with a head on the policy's trunk; and what is saved of them.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlmodule.checkpoint.state import folder_of
from rlmodule.models.building import build_policy
from rlmodule.models.description import ModelConfig
from rlmodule.models.value import build_value_model, with_value_head
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, run_small

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

# An eps this large keeps AdamW from blowing the rounding of a gradient near 0 up to a whole step.
PPO = (
    "algorithm=ppo",
    "optimizer.eps=1e-3",
    "optimizer.warmup_steps=0",
    "batching.max_token_len_per_gpu=240",
    "callbacks.validation.every_n_iterations=0",
)
KINDS = {
    "separate": (
        "model.value=separate",
        "critic.mini_batch_size=4",
        "critic.optimizer.eps=1e-3",
        "critic.optimizer.warmup_steps=0",
        "critic.optimizer.schedule=cosine",
    ),
    "shared": ("model.value=shared", "advantage.bootstrap_truncated=true"),
}
LAYOUTS = {
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "fsdp2": ("strategy=fsdp2",),
    "zero 1": ("strategy=deepspeed", "strategy.stage=1"),
    "zero 3": ("strategy=deepspeed", "strategy.stage=3"),
    "sequences over ddp": ("strategy=ddp", "strategy.sp_size=2"),
    "sequences over fsdp2": ("strategy=fsdp2", "strategy.sp_size=2"),
}


def train(rank: int, folder: Path, world_size: int, *overrides: str) -> list[tuple[str, int, dict[str, float]]]:
    torch.set_num_threads(1)
    return numbers(
        run_small(folder, f"trainer.devices={world_size}", *PPO, *overrides),
        without=(*MADE_OF_TIME, *MADE_OF_THE_LAYOUT),
    )


def on_ranks(folder: Path, world_size: int, *overrides: str) -> list[tuple[str, int, dict[str, float]]]:
    """What the first rank's journal holds."""
    return run_on_ranks(world_size, train, folder, world_size, *overrides)[0]


def assert_same(got, expected, rtol):
    assert [(kind, step) for kind, step, _ in got] == [(kind, step) for kind, step, _ in expected]
    for (_, step, here), (_, _, there) in zip(got, expected, strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert here[name] == pytest.approx(value, rel=rtol, abs=rtol, nan_ok=True), f"{name} of step {step}"


@pytest.fixture(scope="module", params=KINDS)
def alone(request, tmp_path_factory):
    """(kind, its overrides, what one process says)."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, KINDS[request.param], on_ranks(folder / "run", 1, *KINDS[request.param]), folder / "run"


def test_both_models_move_and_say_so(alone):
    kind, _, records, _ = alone
    steps = [metrics for what, _, metrics in records if what == "step"]
    assert all(math.isfinite(m["critic/vf_loss"]) for m in steps if "critic/vf_loss" in m)
    assert sum("actor/pg_loss" in m for m in steps) == 4
    assert sum("critic/vf_loss" in m for m in steps) == (8 if kind == "separate" else 4)
    assert any(m["critic/values/mean"] for what, _, m in records if what == "iteration")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_give_the_numbers_of_one(alone, layout, tmp_path):
    _, overrides, expected, _ = alone
    assert_same(on_ranks(tmp_path / "run", 2, *overrides, *LAYOUTS[layout]), expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_give_the_numbers_of_one_process(kind, tmp_path):
    alone = on_ranks(tmp_path / "alone", 1, *KINDS[kind], TWO_BLOCKS)
    staged = on_ranks(tmp_path / "staged", 2, *KINDS[kind], TWO_BLOCKS, "strategy=fsdp2", "strategy.pp_size=2")
    assert_same(staged, alone, 1e-5)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp2", "zero 3"])
def test_values_are_of_use_where_everything_else_is_bfloat16(alone, layout, tmp_path):
    """VAL-01: no type clashes at the head, whose output stays fp32; losses as in fp32 up to the rounding of bf16."""
    _, overrides, expected, _ = alone
    half = ("strategy.param_dtype=bfloat16", "model.precision=bf16-mixed", "trainer.max_epochs=1")
    got = on_ranks(tmp_path / "run", 2, *overrides, *LAYOUTS[layout], *half)
    first, in_fp32 = (next(m["critic/vf_loss"] for _, _, m in r if "critic/vf_loss" in m) for r in (got, expected))
    assert first == pytest.approx(in_fp32, rel=0.1)


TWO_BLOCKS = "model.architecture.num_hidden_layers=2"
STAGES = ("strategy=fsdp2", "strategy.pp_size=2", TWO_BLOCKS, "model.lora.r=2")
RESUMED = [  # kind, written by, resumed by, and how close it must be
    ("shared", (1, ()), (1, ()), 0.0),
    ("separate", (2, LAYOUTS["ddp"]), (2, LAYOUTS["ddp"]), 0.0),
    ("separate", (2, LAYOUTS["fsdp2"]), (2, LAYOUTS["zero 3"]), 1e-5),
    # The head alone has a bias among adapters: the optimizers of the stages have unlike groups.
    ("shared", (2, STAGES), (2, STAGES), 0.0),
    ("shared", (2, STAGES), (2, (*LAYOUTS["ddp"], *STAGES[2:])), 1e-5),
]


@pytest.mark.parametrize(("kind", "by", "then", "rtol"), RESUMED)
def test_a_resumed_run_equals_one_never_stopped(kind, by, then, rtol, tmp_path):
    """VAL-03: the head, its optimizer and its schedule come back; bit for bit in the same world."""
    (writers, written), (readers, read) = by, then
    keep = ("callbacks.checkpoint.keep=9", "optimizer.schedule=linear")
    whole = on_ranks(tmp_path / "whole", writers, *KINDS[kind], *written, *keep)
    checkpoint = folder_of(tmp_path / "whole" / "checkpoints", 1)
    rest = on_ranks(tmp_path / "rest", readers, *KINDS[kind], *read, *keep, f"resume={checkpoint}")
    assert_same(rest, whole[-len(rest) :], rtol)
    assert any("critic/vf_loss" in metrics for _, _, metrics in rest)


def test_what_is_exported_has_its_head(alone):
    """VAL-03: a trained head lies on disk, beside its trunk, and a new run starts from it."""
    kind, _, _, run = alone
    if kind == "shared":
        path = str(run / "policy")
        head = with_value_head(build_policy(ModelConfig(path=path), seed=0, temperature=1.0), path).value_head
    else:
        head = build_value_model(ModelConfig(path=str(run / "critic")), seed=0).lm.score
    assert head.weight.any(), "a head that starts anew is 0"
    assert head.bias.any()
