"""A model that gives scores and nothing else (``model.kind=reward_model``)."""

from __future__ import annotations

from rlmodule.algorithm.config import PREFERENCES
from rlmodule.core.errors import ConfigError
from rlmodule.models.description import REWARD_MODEL_KIND
from rlmodule.run.config import RunConfig


def check_reward_model(config: RunConfig) -> None:
    """It learns from pairs, and nothing of a policy is asked of it."""
    if not config.model.is_reward_model:
        return
    reads_policy = config.loss.needs & {"old_logprob", "ref_logprob", "selected"}
    if reads_policy or not config.compares_pairs:
        raise ConfigError(
            key="model.kind",
            got=REWARD_MODEL_KIND,
            because=f"{type(config.loss).__name__} is made of the log-probabilities of a policy, and there is none",
            fix="Use algorithm=rm, or model.kind=policy",
        )
    if config.algorithm.source != PREFERENCES:
        raise ConfigError(
            key="algorithm.source",
            got=config.algorithm.source,
            because="a reward model learns from pairs that are there already",
            fix="Use algorithm=rm",
        )
    for key, got in (
        ("model.lora.r", config.model.lora.r),
        ("algorithm.entropy_coeff", config.algorithm.entropy_coeff),
    ):
        if got:
            raise ConfigError(
                key=key, got=got, because="it is for policies, and model.kind=reward_model has none", fix=f"Use {key}=0"
            )
