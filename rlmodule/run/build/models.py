"""The models of a run and what trains each: policy, frozen reference, teacher, value model; or a reward model alone.

The strategy builds them; what it is told of each is here. Leaves out what a model is (``models/``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from rlmodule.algorithm.critic import CriticObjective, JointObjective
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.foresight import Foretold, nothing_foretold
from rlmodule.batching.row_limit import RowLimit
from rlmodule.core.contract import LANGUAGE_MODEL, POLICY_VALUE, VALUE_MODEL, ModelObjective, ModelSpec, Strategy
from rlmodule.core.types import CRITIC, POLICY, REFERENCE, REWARD_MODEL, TEACHER
from rlmodule.models.building import build_policy_on_meta
from rlmodule.models.description import NO_VALUE, PRECISIONS, SEPARATE, SHARED, ModelConfig, load_model_config
from rlmodule.models.policy import PolicyModel
from rlmodule.models.value import build_value_model_on_meta, value_config, with_value_head
from rlmodule.module import RLModule
from rlmodule.ops.vocabulary import Likeliest
from rlmodule.optim.parts.config import OptimizerConfig
from rlmodule.run.config import RunConfig
from rlmodule.run.preflight.teacher import teacher_model
from rlmodule.training.update import Trainable

Minimised = dict[str, tuple[ModelObjective, OptimizerConfig]]  # model that trains -> its objective and its optimizer


def build_module(
    config: RunConfig,
    objective: Objective,
    samples_per_row: float,
    strategy: Strategy,
    foretold: Foretold = nothing_foretold,
) -> RLModule:
    """The Lightning module, with all models of the run.

    Args:
        config: of the run.
        objective: what the policy or the reward model minimises.
        samples_per_row: mean number of samples of a row of the data; the number of optimizer steps follows from it.
        strategy: builds the models.
        foretold: says which rows fit before any was run.
    """
    models = {name: _built(name, spec, strategy) for name, spec in model_specs(config, objective).items()}
    trainables = [
        Trainable(name, of_model, optimizer, config.run_steps(samples_per_row, name))
        for name, (of_model, optimizer) in _minimised(config, objective).items()
    ]
    return RLModule(
        models,
        trainables,
        max_skipped_in_a_row=config.trainer.max_skipped_in_a_row,
        row_limit=RowLimit(config.batching.keep_groups, foretold=foretold),
    )


def critic_model(config: RunConfig) -> ModelConfig:
    """The configuration of a separate value model."""
    return value_config(config.model, config.critic.path, config.critic.architecture)


def model_specs(config: RunConfig, objective: Objective, began_as: ModelConfig | None = None) -> dict[str, ModelSpec]:
    """Name -> spec of every model of the run; models that train come in the order of their optimizers.

    ``began_as`` is the reference, where that is not what ``config.model`` names.
    """
    if config.model.is_reward_model:
        return {REWARD_MODEL: _value_spec(config, "model")}
    specs = {POLICY: _policy_spec(config, config.model, is_trained=True)}
    if objective.needs_reference and not config.model.lora.is_on:
        without_head = replace(began_as or config.model, value=NO_VALUE)
        specs[REFERENCE] = _policy_spec(config, without_head, is_trained=False)
    if config.algorithm.teacher is not None:
        specs[TEACHER] = _teacher_spec(config, objective.num_top_tokens)
    if config.model.value == SEPARATE:
        specs[CRITIC] = _value_spec(config, "critic")
    return specs


def _minimised(config: RunConfig, objective: Objective) -> Minimised:
    """What each model that trains minimises, and with which optimizer."""
    if config.model.is_reward_model:
        return {REWARD_MODEL: (replace(objective, label=REWARD_MODEL), config.optimizer)}
    of_values = CriticObjective(config.critic, config.algorithm)
    if config.model.value == SHARED:
        return {POLICY: (JointObjective(objective, of_values), config.optimizer)}
    minimised: Minimised = {POLICY: (objective, config.optimizer)}
    if config.model.value == SEPARATE:
        minimised[CRITIC] = (of_values, config.critic.optimizer)
    return minimised


def _policy_spec(config: RunConfig, model: ModelConfig, *, is_trained: bool) -> ModelSpec:
    """A policy, with a value head where ``model.value`` says so."""
    temperature, has_head = config.sampling.temperature, model.value == SHARED

    def build_default() -> PolicyModel:
        policy = build_policy_on_meta(model, seed=config.general.seed, temperature=temperature)
        return with_value_head(policy, model.path) if has_head else policy

    return ModelSpec(
        model_type=POLICY_VALUE if has_head else LANGUAGE_MODEL,
        config=model,
        path=model.path,
        is_trained=is_trained,
        temperature=temperature,
        compute_dtype=PRECISIONS[model.precision],
        build_default=build_default,
    )


def _teacher_spec(config: RunConfig, num_top_tokens: int) -> ModelSpec:
    """The frozen teacher; where the loss reads its likeliest tokens, those that the policy knows as well."""
    spec = _policy_spec(config, teacher_model(config), is_trained=False)
    if not num_top_tokens:
        return spec
    known = load_model_config(config.model).get_text_config().vocab_size

    def build_default() -> nn.Module:
        teacher: Any = spec.build_default()
        teacher.likeliest = Likeliest(num_top_tokens, known)
        return teacher  # type: ignore[no-any-return]

    return replace(spec, build_default=build_default)


def _value_spec(config: RunConfig, section: str) -> ModelSpec:
    """A separate value model or a reward model; ``section`` of the configuration is named in errors."""
    model = critic_model(config)
    return ModelSpec(
        model_type=VALUE_MODEL,
        config=model,
        path=model.path,
        is_trained=True,
        temperature=1.0,
        compute_dtype=PRECISIONS[model.precision],
        build_default=partial(build_value_model_on_meta, model, seed=config.general.seed, section=section),
    )


def _built(name: str, spec: ModelSpec, strategy: Strategy) -> nn.Module:
    """The model as the strategy builds it; frozen where it does not train."""
    model = strategy.build(name, spec)
    return model if spec.is_trained else model.requires_grad_(False).eval()
