"""What a strategy is told of the models of a run, and what becomes of those it builds."""

from __future__ import annotations

import pytest
import torch

from rlmodule.algorithm.objective import Objective
from rlmodule.run.build.models import build_module, model_specs
from tests.helpers.runs import small_run

KL = "algorithm.use_kl_loss=true"
RUNS = {
    "a policy alone": ((), {"policy": ("language_model", True)}),
    "with a reference": ((KL,), {"policy": ("language_model", True), "reference": ("language_model", False)}),
    "reference without adapter": ((KL, "model.lora.r=2"), {"policy": ("language_model", True)}),
    "a value head": (
        ("algorithm=ppo", "model.value=shared", KL),
        {"policy": ("policy_value", True), "reference": ("language_model", False)},
    ),
    "a separate value model": (
        ("algorithm=ppo", "model.value=separate"),
        {"policy": ("language_model", True), "critic": ("value_model", True)},
    ),
    "a reward model": (("algorithm=rm", "warm_start.steps=0"), {"reward_model": ("value_model", True)}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_strategy_is_told_the_kind_of_every_model_and_whether_it_trains(tmp_path, name):
    words, expected = RUNS[name]
    config = small_run(tmp_path, *words).config
    specs = model_specs(config, Objective(config.loss, config.algorithm))
    assert {name: (spec.model_type, spec.is_trained) for name, spec in specs.items()} == expected


def test_a_spec_says_where_weights_are_and_how_the_model_computes(tmp_path):
    run = small_run(tmp_path, KL, "model.precision=bf16-mixed", "rollout.temperature=0.7")
    specs = model_specs(run.config, Objective(run.config.loss, run.config.algorithm))
    for spec in specs.values():
        assert (spec.path, spec.temperature, spec.compute_dtype) == (None, 0.7, torch.bfloat16)
        model = spec.build_default()
        assert (model.temperature, model.compute_dtype) == (0.7, torch.bfloat16)


def test_the_reference_starts_as_the_policy_shares_nothing_with_it_and_is_frozen(tmp_path):
    run = small_run(tmp_path, KL)
    objective = Objective(run.config.loss, run.config.algorithm)
    module = build_module(run.config, objective, run.dataset.samples_per_row, run.strategy.build())
    policy, reference = module.models["policy"], module.models["reference"]
    pairs = list(zip(policy.named_parameters(), reference.named_parameters(), strict=True))
    assert pairs
    for (name, mine), (other, theirs) in pairs:
        assert name == other
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert all(p.requires_grad for p in policy.parameters())
    assert not any(p.requires_grad for p in reference.parameters())
    assert not reference.training
