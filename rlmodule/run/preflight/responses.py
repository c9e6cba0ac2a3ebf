"""How responses are drawn and judged, and whether what was drawn can be learned from."""

from __future__ import annotations

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.core.errors import ConfigError
from rlmodule.run.config import RunConfig


def check_temperature(config: RunConfig) -> None:
    """Only what is sampled has a temperature."""
    if config.rollout.temperature != 1.0 and not config.algorithm.is_sampled:
        raise ConfigError(
            key="rollout.temperature",
            got=config.rollout.temperature,
            because=f"{config.algorithm.source} are learned from at temperature 1",
            fix="Use 1.0",
        )


def check_reward(config: RunConfig) -> None:
    """A reward that knows one right response is not for tasks that have many."""
    task, reward = config.task, config.reward
    if task is not None and reward is not None and task.has_many_answers and reward.knows_one_response:
        raise ConfigError(
            key="data.task",
            got=config.data.task,
            because=f"many responses to its prompts are right, and the reward {type(reward).__name__} takes one only",
            fix=f"Use data={config.data.task}, which chooses its reward too",
        )


def check_old_logprob(config: RunConfig) -> None:
    """A sampler's log-probabilities stand for the policy's only where it draws from the whole of it."""
    if config.algorithm.uses_rollout_logprob and not config.rollout.draws_from_policy:
        rollout = config.rollout
        raise ConfigError(
            key="algorithm.old_logprob",
            got=config.algorithm.old_logprob,
            because=f"with rollout.top_k={rollout.top_k} and rollout.top_p={rollout.top_p} the sampler draws from a "
            "part of the policy's distribution, so its log-probabilities are not the policy's",
            fix="Use algorithm.old_logprob=recompute, or rollout.top_k=0 rollout.top_p=1",
        )


def check_staleness(config: RunConfig) -> None:
    """Old responses are trained on again where somebody draws new ones, and weights make up for their age."""
    staleness, algorithm = config.rollout.staleness, config.algorithm
    if staleness == 0:
        return
    mode = algorithm.rollout_correction.mode
    for is_wrong, because, fix in (
        (config.dataset != ROLLOUTS, "nothing is sampled here, so nothing grows old", "Use rollout.staleness=0"),
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
            staleness >= config.trainer.max_epochs,
            f"the run has {config.trainer.max_epochs} iterations",
            f"Use rollout.staleness={config.trainer.max_epochs - 1} or less",
        ),
    ):
        if is_wrong:
            raise ConfigError(key="rollout.staleness", got=staleness, because=because, fix=fix)
