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
from rlmodule.models.building import outline_policy
from rlmodule.models.description import ONLY, SEPARATE, SHARED, ModelConfig
from rlmodule.models.value import outline_value_model, value_config, with_value_head
from rlmodule.module import RLModule
from rlmodule.algorithm.objective import Objective
from rlmodule.optim.optimizer import OptimizerConfig
from rlmodule.run.settings import Settings
from rlmodule.run.preflight.teacher import teacher_model
from rlmodule.training.update import Trainable

Minimised = dict[str, tuple[ModelObjective, OptimizerConfig]]  # what each model that trains minimises, and how


def new_module(settings: Settings, objective: Objective, samples_per_row: float) -> RLModule:
    """The Lightning module, with all models of the run.

    Args:
        settings: of the run.
        objective: what the leading model minimises.
        samples_per_row: samples that a row of the data comes to, of which the number of optimizer steps follows.
    """
    make = _reward_model if settings.model.value == ONLY else _policy
    models, minimised = make(settings, objective)
    trainables = [
        Trainable(name, of_model, optimizer, settings.run_steps(samples_per_row, name))
        for name, (of_model, optimizer) in minimised.items()
    ]
    return RLModule(models, trainables, max_skipped_in_a_row=settings.trainer.max_skipped_in_a_row)


def critic_model(settings: Settings) -> ModelConfig:
    """What a value model of its own is."""
    return value_config(settings.model, settings.critic.path, settings.critic.architecture)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A model of the same weights that never trains and shares nothing with the original."""
    return _frozen(copy.deepcopy(model))


def _reward_model(settings: Settings, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
    """A value model by itself, which gives the scores that the objective wants."""
    model = outline_value_model(critic_model(settings), seed=settings.run.seed, section="model")
    return {REWARD_MODEL: model}, {REWARD_MODEL: (replace(objective, label=REWARD_MODEL), settings.optimizer)}


def _policy(settings: Settings, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
    """The policy and what stands beside it: frozen reference, teacher, value model."""
    seed = settings.run.seed
    of_values = CriticObjective(settings.critic, settings.algorithm)
    policy = outline_policy(settings.model, seed=seed, temperature=settings.rollout.temperature)
    if settings.model.value == SHARED:
        policy = with_value_head(policy, settings.model.path)
    models: dict[str, nn.Module] = {POLICY: policy}
    if objective.needs_reference and policy.lora is None:
        models[REFERENCE] = frozen_copy(policy)
    if settings.algorithm.teacher is not None:
        made = outline_policy(teacher_model(settings), seed=seed, temperature=settings.rollout.temperature)
        models[TEACHER] = _frozen(made)
    minimised: Minimised = {POLICY: (objective, settings.optimizer)}
    if settings.model.value == SHARED:
        minimised[POLICY] = (JointObjective(objective, of_values), settings.optimizer)
    if settings.model.value == SEPARATE:
        models[CRITIC] = outline_value_model(critic_model(settings), seed=seed)
        minimised[CRITIC] = (of_values, settings.critic.optimizer)
    return models, minimised


def _frozen(model: nn.Module) -> nn.Module:
    """The model itself, which never trains from now on."""
    model.requires_grad_(False)
    return model.eval()
