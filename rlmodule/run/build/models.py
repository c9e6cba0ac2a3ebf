"""The models of a run and what trains each: policy, frozen reference, teacher, value model; or a reward model alone.

Outlines without weights: the strategy reads those. Leaves out what a model is (``models/``).
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from rlmodule.core.contract import ModelObjective
from rlmodule.core.types import CRITIC, POLICY, REFERENCE, REWARD_MODEL, TEACHER
from rlmodule.algorithm.critic import CriticObjective, JointObjective
from rlmodule.models.building import build_policy_on_meta
from rlmodule.models.description import SEPARATE, SHARED, ModelConfig
from rlmodule.models.value import build_value_model_on_meta, value_config, with_value_head
from rlmodule.module import RLModule
from rlmodule.algorithm.objective import Objective
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.teacher import teacher_model
from rlmodule.training.update import Trainable

Minimised = dict[str, tuple[ModelObjective, OptimizerConfig]]  # what each model that trains minimises, and how


def build_module(config: RunConfig, objective: Objective, samples_per_row: float) -> RLModule:
    """The Lightning module, with all models of the run.

    Args:
        config: of the run.
        objective: what the leading model minimises.
        samples_per_row: samples that a row of the data comes to, of which the number of optimizer steps follows.
    """
    make = _reward_model if config.model.is_reward_model else _policy
    models, minimised = make(config, objective)
    trainables = [
        Trainable(name, of_model, optimizer, config.run_steps(samples_per_row, name))
        for name, (of_model, optimizer) in minimised.items()
    ]
    return RLModule(models, trainables, max_skipped_in_a_row=config.trainer.max_skipped_in_a_row)


def critic_model(config: RunConfig) -> ModelConfig:
    """What a value model of its own is."""
    return value_config(config.model, config.critic.path, config.critic.architecture)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A model of the same weights that never trains and shares nothing with the original."""
    return _frozen(copy.deepcopy(model))


def _reward_model(config: RunConfig, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
    """A value model by itself, which gives the scores that the objective wants."""
    model = build_value_model_on_meta(critic_model(config), seed=config.general.seed, section="model")
    return {REWARD_MODEL: model}, {REWARD_MODEL: (replace(objective, label=REWARD_MODEL), config.optimizer)}


def _policy(config: RunConfig, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
    """The policy and what stands beside it: frozen reference, teacher, value model."""
    seed = config.general.seed
    of_values = CriticObjective(config.critic, config.algorithm)
    policy = build_policy_on_meta(config.model, seed=seed, temperature=config.rollout.temperature)
    if config.model.value == SHARED:
        policy = with_value_head(policy, config.model.path)
    models: dict[str, nn.Module] = {POLICY: policy}
    if objective.needs_reference and policy.lora is None:
        models[REFERENCE] = frozen_copy(policy)
    if config.algorithm.teacher is not None:
        made = build_policy_on_meta(teacher_model(config), seed=seed, temperature=config.rollout.temperature)
        models[TEACHER] = _frozen(made)
    minimised: Minimised = {POLICY: (objective, config.optimizer)}
    if config.model.value == SHARED:
        minimised[POLICY] = (JointObjective(objective, of_values), config.optimizer)
    if config.model.value == SEPARATE:
        models[CRITIC] = build_value_model_on_meta(critic_model(config), seed=seed)
        minimised[CRITIC] = (of_values, config.critic.optimizer)
    return models, minimised


def _frozen(model: nn.Module) -> nn.Module:
    """The model itself, which never trains from now on."""
    model.requires_grad_(False)
    return model.eval()
