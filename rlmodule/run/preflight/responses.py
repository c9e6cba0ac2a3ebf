"""How responses are drawn and judged, and whether what was drawn can be learned from."""

from __future__ import annotations

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.core.errors import ConfigError
from rlmodule.run.settings import Settings


def check_temperature(settings: Settings) -> None:
    """Only what is sampled has a temperature."""
    if settings.rollout.temperature != 1.0 and not settings.algorithm.is_sampled:
        raise ConfigError(
            key="rollout.temperature",
            got=settings.rollout.temperature,
            because=f"{settings.algorithm.source} are learned from at temperature 1",
            fix="Use 1.0",
        )


def check_reward(settings: Settings) -> None:
    """A reward that knows one right response is not for tasks that have many."""
    task, reward = settings.task, settings.reward
    if task is not None and reward is not None and task.has_many_answers and reward.knows_one_response:
        raise ConfigError(
            key="data.task",
            got=settings.data.task,
            because=f"many responses to its prompts are right, and the reward {type(reward).__name__} takes one only",
            fix=f"Use data={settings.data.task}, which chooses its reward too",
        )


def check_old_logprob(settings: Settings) -> None:
    """A sampler's log-probabilities stand for the policy's only where it draws from the whole of it."""
    if settings.algorithm.reads_sampler and not settings.rollout.draws_from_policy:
        rollout = settings.rollout
        raise ConfigError(
            key="algorithm.old_logprob",
            got=settings.algorithm.old_logprob,
            because=f"with rollout.top_k={rollout.top_k} and rollout.top_p={rollout.top_p} the sampler draws from a "
            "part of the policy's distribution, so its log-probabilities are not the policy's",
            fix="Use algorithm.old_logprob=recompute, or rollout.top_k=0 rollout.top_p=1",
        )


def check_staleness(settings: Settings) -> None:
    """Old responses are trained on again where somebody draws new ones, and weights make up for their age."""
    staleness, algorithm = settings.rollout.staleness, settings.algorithm
    if staleness == 0:
        return
    mode = algorithm.rollout_correction.mode
    for is_wrong, because, fix in (
        (settings.supply != ROLLOUTS, "nothing is sampled here, so nothing grows old", "Use rollout.staleness=0"),
        (
            mode not in ("truncate", "mask"),
            f"with algorithm.rollout_correction.mode={mode} nothing corrects for what was learned since",
            "Use algorithm.rollout_correction.mode=truncate",
        ),
        (
            algorithm.filter_groups.enable,
            "algorithm.filter_groups samples until enough groups tell anything, and old ones would count among them",
            "Use algorithm.filter_groups.enable=false",
        ),
        (
            staleness >= settings.trainer.max_epochs,
            f"the run has {settings.trainer.max_epochs} iterations",
            f"Use rollout.staleness={settings.trainer.max_epochs - 1} or less",
        ),
    ):
        if is_wrong:
            raise ConfigError(key="rollout.staleness", got=staleness, because=because, fix=fix)
