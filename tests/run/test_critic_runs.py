"""Whole PPO runs in one process: who trains in which iteration, on mini-batches of which size, from which weights."""

import pytest
import torch

from rlmodule.checkpoint.state import folder_of
from rlmodule.models.building import build_policy
from rlmodule.models.value import build_value_model
from rlmodule.run.build.models import critic_model
from strategies.parts.shards import read_whole
from strategies.parts.snapshot import SHARDS
from tests.helpers.runs import run_small, small_run

pytestmark = pytest.mark.filterwarnings("ignore")
PPO = ("algorithm=ppo", "callbacks.validation.every_n_iterations=0")


def steps_of(records, iteration):
    return [r.metrics for r in records if r.kind == "step" and r.iteration == iteration]


def changed(folder, name, model):
    parts = read_whole(folder / SHARDS)
    return [key for key, p in model.named_parameters() if not torch.equal(parts[f"{name}.{key}"], p)]


def test_while_the_critic_warms_up_the_policy_stays_as_it_is(tmp_path):
    overrides = (*PPO, "critic.warmup_iterations=1", "optimizer.warmup_steps=4", "optimizer.lr=0.01")
    records = run_small(tmp_path / "run", *overrides)
    run = small_run(tmp_path / "other", *overrides)
    policy = build_policy(run.config.model, seed=0, temperature=1.0)
    critic = build_value_model(critic_model(run.config), seed=0)
    after = [folder_of(tmp_path / "run" / "checkpoints", iteration) for iteration in (1, 2)]
    assert changed(after[0], "policy", policy) == []
    assert "lm.score.weight" in changed(after[0], "critic", critic)
    assert "lm.model.norm.weight" in changed(after[1], "policy", policy)
    assert all("actor/pg_loss" not in m and "critic/vf_loss" in m for m in steps_of(records, 1))
    assert all("actor/pg_loss" in m and "critic/vf_loss" in m for m in steps_of(records, 2))
    assert [m["actor/lr"] for m in steps_of(records, 2)] == pytest.approx([0, 0.0025]), "its schedule starts with it"


def test_mini_batches_of_a_critic_have_their_own_size(tmp_path):
    """16 samples: two steps of the policy, then four of the critic, in each of two epochs."""
    records = run_small(tmp_path / "run", *PPO, "critic.mini_batch_size=4", "algorithm.ppo_epochs=2")
    who = ["actor" if "actor/pg_loss" in m else "critic" for m in steps_of(records, 1)]
    assert who == (["actor"] * 2 + ["critic"] * 4) * 2
    clipped = [m["actor/clip_frac"] for m in steps_of(records, 1) if "actor/pg_loss" in m]
    assert clipped[0] == 0, "the first ratio is 1"


def test_one_size_shares_the_mini_batches(tmp_path):
    records = run_small(tmp_path / "run", *PPO)
    assert all({"actor/pg_loss", "critic/vf_loss"} <= m.keys() for m in steps_of(records, 1))
    assert len(steps_of(records, 1)) == 2


def test_equal_counts_fill_up_to_what_both_sizes_allow(tmp_path):
    """16 samples, steps of 8 and 6: a multiple of both is 24, so the policy takes 3 steps and the critic 4."""
    fill = ("batching.equal_counts=true", "batching.planner=karmarkar_karp", "critic.mini_batch_size=6")
    records = run_small(tmp_path / "run", *PPO, *fill)
    who = ["actor" if "actor/pg_loss" in m else "critic" for m in steps_of(records, 1)]
    assert (who.count("actor"), who.count("critic")) == (3, 4)


def test_a_smaller_value_model_of_another_family(tmp_path):
    small = (
        "+critic.architecture.model_type=llama",
        "+critic.architecture.vocab_size=260",
        "+critic.architecture.hidden_size=8",
        "+critic.architecture.intermediate_size=8",
        "+critic.architecture.num_hidden_layers=1",
        "+critic.architecture.num_attention_heads=1",
        "+critic.architecture.max_position_embeddings=256",
    )
    records = run_small(tmp_path / "run", *PPO, *small)
    assert (tmp_path / "run" / "critic" / "config.json").read_text().count("LlamaForTokenClassification") == 1
    assert steps_of(records, 2)[-1]["critic/vf_loss"] > 0


def test_values_come_to_explain_returns(tmp_path):
    """A reward that depends on the length alone, which every token of an unfinished response foretells a little."""
    learn = ("trainer.max_epochs=6", "critic.optimizer.warmup_steps=0", "critic.optimizer.lr=0.02", "optimizer.lr=0")
    records = run_small(tmp_path / "run", *PPO, *learn, "algorithm.ppo_epochs=2")
    losses = [m["critic/vf_loss"] for r in range(1, 7) for m in steps_of(records, r)]
    assert losses[-1] < losses[0] / 2
