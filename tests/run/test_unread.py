"""Issue 10, point 21: a setting that nothing in the run reads is said, and no other one is."""

from __future__ import annotations

import pytest

from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.run import Run
from rlmodule.run.unread import SWITCHED, unread
from strategies.registry import STRATEGIES
from tests.test_conf import compose

STEPS = 280

# Command line -> what is said of it.
WITHOUT_EFFECT = {
    "algorithm.kl_loss_coef=5": "algorithm.kl_loss_coef=5.0 is read only with use_kl_loss=true",
    "algorithm.kl_in_reward.coef=5": "algorithm.kl_in_reward.coef=5.0 is read only with algorithm.use_kl_in_reward",
    "algorithm.overlong_buffer.length=4": "algorithm.overlong_buffer.length=4 is read only with",
    "algorithm.filter_groups.max_num_gen_batches=3": "is read only with algorithm.filter_groups.enable=true",
    "algorithm.rollout_correction.upper=5": "is read only with algorithm.rollout_correction.mode=",
    "algorithm.loss_scale_factor=99": "is read only with algorithm.loss_agg_mode=seq-mean-token-sum-norm",
    "batching.micro_batch_size_per_gpu=4": "is read only with batching.use_dynamic_bsz=false",
    "batching=fixed batching.min_micro_steps=4": "batching.min_micro_steps=4 is read only with",
    "model.lora.alpha=3": "model.lora.alpha=3 is read only with model.lora.r=8",
    "warm_start=none warm_start.lr=1": "warm_start.lr=1.0 is read only with warm_start.steps above 0",
    "data.answer_key=foo": "data.answer_key=foo is read only with data=files",
    "data.format=verl": "data.format=verl is read only with data=files",
    "critic.optimizer.lr=5": "critic.optimizer=... is read only with model.value=separate",
    "critic.clip_range=1": "critic.clip_range=1.0 is read only with model.value=shared or separate",
    "optimizer.warmup_steps=100000": "goes beyond the run's 280 optimizer steps",
    "callbacks.checkpoint.best_metric=null callbacks.checkpoint.best_mode=min": "callbacks.checkpoint.best_mode=min",
}
# With the switch that makes them count, or their defaults.
READ = [
    "",
    "algorithm.use_kl_loss=true algorithm.kl_loss_coef=5",
    "algorithm=dapo",
    "algorithm=dr_grpo",
    "algorithm=ppo critic.optimizer.lr=5 critic.clip_range=1",
    "model.lora.r=4 model.lora.alpha=3",
    "warm_start.lr=1",
    "batching=fixed",
    "experiment=compare",
    "debug=fast",
    "data=files data.train_files=[x.jsonl] data.answer_key=foo",
]


def said_of(line: str) -> list[str]:
    return unread(Run.read(compose(*line.split()), RunDirectory("."), STRATEGIES).config, STEPS)


@pytest.mark.parametrize(("line", "says"), WITHOUT_EFFECT.items())
def test_a_setting_without_effect_is_said(line, says):
    [said] = said_of(line)
    assert says in said, said


@pytest.mark.parametrize("line", READ)
def test_a_setting_that_is_read_is_not(line):
    assert said_of(line) == []


def test_every_rule_names_keys_that_exist():
    config = Run.read(compose(), RunDirectory("."), STRATEGIES).config
    for rule in SWITCHED:
        section = config
        for name in rule.section.split("."):
            section = getattr(section, name)
        assert all(hasattr(section, name) for name in rule.names), rule.section


def test_a_run_says_it_once_before_it_starts(tmp_path):
    run = Run.read(compose(f"run_dir={tmp_path}", "model.lora.alpha=3"), RunDirectory(tmp_path), STRATEGIES)
    with pytest.warns(
        UserWarning, match=r"settings without effect in this run: model\.lora\.alpha=3 is read"
    ) as caught:
        run.check()
    assert len(caught) == 1
