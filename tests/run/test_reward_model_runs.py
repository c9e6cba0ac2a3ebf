"""Reward models through whole runs: scores at the end of responses, learned from pairs, of use to PPO afterwards.

The loss itself is in ``losses/test_pairs.py``.
"""

import math
from pathlib import Path

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.checkpoint.state import oldest_first, verify
from rlmodule.core.types import StepTotals, TrainingSample
from rlmodule.models.description import ModelConfig
from rlmodule.models.value import build_value_model
from rlmodule.records.run_directory import RunDirectory, result
from rlmodule.run.build.models import critic_model
from tests.helpers.ranks import run_on_ranks
from tests.helpers.runs import MADE_OF_THE_LAYOUT, MADE_OF_TIME, numbers, run_small, small_run

pytestmark = pytest.mark.filterwarnings("ignore")
RM = (
    "algorithm=rm",
    "algorithm.train_batch_size=8",
    "model.architecture.num_key_value_heads=2",
    "warm_start.steps=0",
    "optimizer.eps=1e-3",
    "optimizer.warmup_steps=0",
)


def of_steps(records, name):
    return [r.metrics[name] for r in records if r.kind == "step"]


def test_a_reward_model_starts_undecided_and_learns_to_tell_pairs_apart(tmp_path):
    """All scores are 0 at first: log 2 to lose. No pair comes twice, nothing is sampled, and there is no policy."""
    learn = ("algorithm.train_batch_size=128", "batching.mini_batch_size=64", "optimizer.eps=1e-8")
    sizes = ("environment.train_size=1024", "environment.test_size=64")
    records = run_small(tmp_path, *RM, *learn, *sizes, "trainer.max_epochs=8")
    losses, accuracies = of_steps(records, "reward_model/loss"), of_steps(records, "reward_model/pair_accuracy")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert sum(losses[-4:]) / 4 < 0.4
    assert sum(accuracies[-4:]) / 4 > 0.85
    held_out = [r.metrics for r in records if r.kind == "validation"]
    assert held_out[0]["val/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (held_out[0]["val/pair_accuracy"], held_out[0]["val/margin"]) == (0, 0), "alike is not told apart"
    assert held_out[-1]["val/pair_accuracy"] > 0.85
    assert held_out[-1]["val/loss"] < 0.4
    assert held_out[-1]["val/margin"] > 1
    manifest = verify(oldest_first(tmp_path / "checkpoints")[-1])
    assert manifest.entries["best"] == {
        "metric": "val/pair_accuracy",
        "mode": "max",
        "value": held_out[-1]["val/pair_accuracy"],
    }
    assert result(RunDirectory(tmp_path)) == held_out[-1]["val/pair_accuracy"], "what a sweep is told"
    assert not (tmp_path / "policy").exists()
    assert not [name for r in records for name in r.metrics if name.startswith(("actor/", "reward/"))]


def test_the_score_of_a_response_is_read_at_its_last_token(tmp_path):
    run = small_run(tmp_path, *RM)
    model = build_value_model(critic_model(run.config), seed=0)
    torch.nn.init.normal_(model.lm.score.weight, generator=torch.Generator().manual_seed(1))
    rows = [sample for pair in run.dataset.pairs[:4] for sample in (pair.chosen, pair.rejected)]
    assert all(int(sample.loss_mask.sum()) == 1 for sample in rows)
    scores = model(pack_rows([TrainingSample(sample) for sample in rows], StepTotals(tokens=99, sequences=9))).value
    model.lm.set_attn_implementation("eager")
    for sample, score in zip(rows, scores.tolist(), strict=True):
        ids = torch.cat([torch.tensor(sample.prompt.ids), sample.response_ids])[:-1]  # less the place after the end
        last = model.lm.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -1:]
        assert model.lm.score(last).item() == pytest.approx(score, rel=1e-4, abs=1e-5)


def train(rank: int, folder: Path, world_size: int, *overrides: str):
    torch.set_num_threads(1)
    records = run_small(folder, *RM, f"trainer.devices={world_size}", *overrides)
    return numbers(records, without=(*MADE_OF_TIME, *MADE_OF_THE_LAYOUT))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(what one process says, its run directory)."""
    folder = tmp_path_factory.mktemp("one") / "run"
    return run_on_ranks(1, train, folder, 1)[0], folder


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        ("strategy=ddp",),
        ("strategy=ddp", "strategy.sp_size=2"),
        ("strategy=fsdp2",),
        ("strategy=deepspeed", "strategy.stage=3"),
    ],
)
def test_two_processes_give_the_numbers_of_one(alone, layout, tmp_path):
    small_budget = "batching.max_token_len_per_gpu=64"
    got = run_on_ranks(2, train, tmp_path / "run", 2, small_budget, *layout)[0]
    for (_, step, here), (_, _, there) in zip(got, alone[0], strict=True):
        asked = {name: value for name, value in there.items() if name.startswith(("reward_model/", "train/", "val/"))}
        assert {name: here[name] for name in asked} == pytest.approx(asked, rel=1e-4, abs=1e-5), step


@pytest.mark.ranks
def test_ppo_starts_its_values_from_a_reward_model(alone, tmp_path):
    """Also the fp32 head: nothing of it is lost between the two runs."""
    folder = alone[1] / "reward_model"
    head = build_value_model(ModelConfig(path=str(folder)), seed=0).lm.score
    assert head.weight.any()
    records = run_small(tmp_path, "algorithm=ppo", f"critic.path={folder}", "trainer.max_epochs=1")
    says = next(r.metrics for r in records if r.kind == "iteration")
    assert says["critic/values/mean"] != 0
