"""How responses are drawn and judged, and whether what was drawn can be learned from."""

from __future__ import annotations

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.core.contract import ServedReward
from rlmodule.core.errors import ConfigError
from rlmodule.core.registry import name_of
from rlmodule.run.config import RunConfig


def check_temperature(config: RunConfig) -> None:
    """Only what is sampled has a temperature."""
    if config.sampling.temperature != 1.0 and not config.algorithm.is_sampled:
        raise ConfigError(
            key="rollout.temperature",
            got=config.sampling.temperature,
            because=f"{config.algorithm.source} are learned from at temperature 1",
            fix="Use 1.0",
        )


def check_reward(config: RunConfig) -> None:
    """A reward function that knows one right response is not for environments that have many."""
    environment, reward, name = config.environment, config.reward, config.environment_name
    if environment is None or reward is None or environment.gives_rewards:
        return
    if environment.has_many_answers and reward.knows_one_response:
        raise ConfigError(
            key="reward",
            got=name_of(type(reward)),
            because=f"many responses to the prompts of environment={name} are right, and this reward takes one only",
            fix=f"Leave reward= out: environment={name} chooses its own",
        )


def check_reward_server(config: RunConfig) -> None:
    """Whoever scores responses here has what a server asks for; commands that score none do without."""
    if isinstance(config.reward, ServedReward):
        config.reward.check_here("reward")


def check_sampler_logprob(config: RunConfig) -> None:
    """A sampler's log-probabilities stand for the policy's, or beside them, only where it draws from the whole of it.

    The ratio of the two would be the share of the policy that may be drawn, a little less than 1 at every token, and
    next to nothing over a long response.
    """
    sampling, algorithm = config.sampling, config.algorithm
    if sampling.draws_from_policy:
        return
    readers = {"old_logprob": algorithm.old_logprob} if algorithm.uses_rollout_logprob else {}
    for key, got in (readers | algorithm.learns_from_comparisons).items():
        instead = _without(key)
        raise ConfigError(
            key=f"algorithm.{key}",
            got=got,
            because=f"with rollout.top_k={sampling.top_k} and rollout.top_p={sampling.top_p} the sampler draws from a "
            "part of the policy's distribution, so its log-probabilities are not the policy's",
            fix=f"Use algorithm.{key}={instead}, or rollout.top_k=0 rollout.top_p=1",
        )


def _without(key: str) -> str:
    """The value of a key of the algorithm with which no log-probability of a sampler is learned from."""
    return {"old_logprob": "recompute", "rollout_correction.mode": "observe"}.get(key, "none")


def check_corrected_pairs(config: RunConfig) -> None:
    """Weights and rejection make up for an expectation over what a policy draws, which a loss of pairs is not.

    It asks which of two whole responses is better, as of pairs that were there already: half a response, or one that
    counts less than the other, would be compared with nothing.
    """
    for key, got in config.algorithm.learns_from_comparisons.items() if config.compares_pairs else ():
        raise ConfigError(
            key=f"algorithm.{key}",
            got=got,
            because=f"{type(config.loss).__name__} compares two whole responses, whichever policy drew them, so there "
            "is nothing to correct",
            fix=f"Use algorithm.{key}={_without(key)}",
        )


def check_rollout_weight(config: RunConfig) -> None:
    """An estimator that counts by weights needs a loss that has them."""
    mode = config.algorithm.rollout_correction.mode
    if config.advantage_reads("rollout_weight") and mode not in ("truncate", "mask"):
        raise ConfigError(
            key="advantage",
            got=name_of(type(config.advantage)),
            because=f"it counts tokens by their weights, and algorithm.rollout_correction.mode={mode} gives none",
            fix="Use rollout_correction=tis, or advantage=optimal_token_baseline",
        )


def check_ahead(config: RunConfig) -> None:
    """Responses are drawn ahead where servers draw them, and something makes up for their age."""
    ahead, algorithm, engine = config.ahead, config.algorithm, name_of(type(config.rollout))
    corrects = _makes_up_for_age(config) or algorithm.uses_rollout_logprob
    for is_wrong, because, fix in (
        (config.dataset != ROLLOUTS, "nothing is sampled here", "Use rollout.ahead=0"),
        (
            config.rollout.in_process,
            f"rollout={engine} samples with the processes that train, which cannot do both at a time",
            "Use rollout=vllm or rollout=server",
        ),
        (
            not config.rollout.pauses,
            "servers that sleep while the trainer trains draw nothing then",
            "Use rollout.sleep=false",
        ),
        (
            not corrects,
            f"with algorithm.rollout_correction.mode={algorithm.rollout_correction.mode} and algorithm.old_logprob="
            f"{algorithm.old_logprob} nothing corrects for what was learned since a response was drawn",
            "Use algorithm.rollout_correction.mode=truncate, or algorithm.old_logprob=rollout",
        ),
        (
            config.replay.staleness > 0,
            f"rollout.staleness={config.replay.staleness} trains on old responses again",
            "Use one of the two",
        ),
    ):
        if ahead.ahead and is_wrong:
            raise ConfigError(key="rollout.ahead", got=ahead.ahead, because=because, fix=fix)
    if ahead.ahead and ahead.pause not in config.rollout.pauses:
        raise ConfigError(
            key="rollout.pause",
            got=ahead.pause,
            because=f"servers of rollout={engine} cannot do that, or do not say then which weights drew which token",
            fix=f"Use one of: {', '.join(config.rollout.pauses)}",
        )


def _makes_up_for_age(config: RunConfig) -> bool:
    """Whether tokens are weighted for what was learned since they were drawn, or it does not matter who drew them."""
    return config.compares_pairs or config.algorithm.rollout_correction.mode in ("truncate", "mask")


def check_staleness(config: RunConfig) -> None:
    """Old responses are trained on again where somebody draws new ones, and weights make up for their age."""
    staleness, algorithm = config.replay.staleness, config.algorithm
    if staleness == 0:
        return
    mode = algorithm.rollout_correction.mode
    for is_wrong, because, fix in (
        (config.dataset != ROLLOUTS, "nothing is sampled here, so nothing grows old", "Use rollout.staleness=0"),
        (
            not _makes_up_for_age(config),
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
