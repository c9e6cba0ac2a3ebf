"""A model that gives scores and nothing else (``model.value=only``)."""

from __future__ import annotations

from rlmodule.algorithm.config import PREFERENCES
from rlmodule.core.errors import ConfigError
from rlmodule.models.description import ONLY
from rlmodule.run.settings import Settings


def check_reward_model(settings: Settings) -> None:
    """It learns from pairs, and nothing of a policy is asked of it."""
    if settings.model.value != ONLY:
        return
    reads_policy = settings.loss.needs & {"old_logprob", "ref_logprob", "selected"}
    if reads_policy or "group" not in settings.loss.needs:
        raise ConfigError(
            key="model.value",
            got=ONLY,
            because=f"{type(settings.loss).__name__} is made of the log-probabilities of a policy, and there is none",
            fix="Use algorithm=rm, or model.value=none",
        )
    if settings.algorithm.source != PREFERENCES:
        raise ConfigError(
            key="algorithm.source",
            got=settings.algorithm.source,
            because="a reward model learns from pairs that are there already",
            fix="Use algorithm=rm",
        )
    for key, got in (
        ("model.lora.r", settings.model.lora.r),
        ("algorithm.entropy_coeff", settings.algorithm.entropy_coeff),
    ):
        if got:
            raise ConfigError(
                key=key, got=got, because="it is for policies, and model.value=only has none", fix=f"Use {key}=0"
            )
