"""Samples that are compared with each other: enough of them in a group, and the two of a pair together."""

from __future__ import annotations

import torch

from rlmodule.core.contract import Advantage
from rlmodule.core.errors import ConfigError
from rlmodule.core.registry import name_of
from rlmodule.core.types import AdvantageInputs
from rlmodule.run.config import STORED, RunConfig

PAIRS = ((1.0, -1.0), (1.0, 0.0), (0.5, 0.25), (-1.0, -2.0), (9.0, 8.9))  # rewards of better and worse responses


def check_groups(config: RunConfig) -> None:
    """An estimator that compares a response finds what it compares with."""
    if config.dataset == STORED:
        return  # the size of groups is in the file, see check_rollouts
    if config.algorithm.filter_groups.enable and config.sampling.n == 1:
        raise ConfigError(
            key="rollout.n",
            got=1,
            because="algorithm.filter_groups leaves out groups without two different rewards, so all of one",
            fix="Use rollout.n=8, or algorithm.filter_groups.enable=false",
        )
    if config.advantage_reads("baseline") and not config.algorithm.is_sampled:
        raise ConfigError(
            key="advantage",
            got=type(config.advantage).__name__,
            because=f"it compares with the policy's own answer, and {config.algorithm.source} are not answered anew",
            fix="Use advantage=grpo",
        )
    if config.advantage_reads("group") and config.group_size == 1:
        raise ConfigError(
            key="rollout.n",
            got=1,
            because=f"{type(config.advantage).__name__} compares the responses of a prompt with each other, "
            "and one response has nothing to be compared with",
            fix="Use rollout.n=8",
        )


def check_components(config: RunConfig) -> None:
    """What is taken off the reward reaches an estimator that reads its components one by one."""
    algorithm = config.algorithm
    taken_off = {
        "overlong_buffer.enable": (algorithm.overlong_buffer.enable, "reward=[...,length]"),
        "use_kl_in_reward": (algorithm.use_kl_in_reward, "algorithm.use_kl_loss=true"),
    }
    for key, (is_on, instead) in taken_off.items() if config.advantage_reads("parts") else ():
        if is_on:
            raise ConfigError(
                key=f"algorithm.{key}",
                got=True,
                because=f"{type(config.advantage).__name__} reads the components of the reward one by one, and this is "
                "taken off their sum, which it does not read",
                fix=f"Use false, with {instead} in its place, or another advantage",
            )


def _tells_pairs_apart(advantage: Advantage) -> bool:
    """Whether an estimator has opposite signs for the two of a pair, as asked of pairs of many kinds."""
    if "parts" in advantage.needs:
        return True  # by their parts, which are known once there are rewards
    if advantage.per_token or advantage.needs != {"group"}:
        return False  # tokens of one response may differ, and the two of a pair need not be compared
    better, worse = torch.tensor(PAIRS, dtype=torch.float64).unbind(1)
    pairs, lengths = torch.arange(len(PAIRS)), torch.arange(1, 2 * len(PAIRS) + 1)
    given = advantage(AdvantageInputs(torch.cat([better, worse]), torch.cat([pairs, pairs]), lengths.flip(0)))
    return bool((given[: len(PAIRS)] > 0).all() and (given[len(PAIRS) :] < 0).all())


def check_pairs(config: RunConfig) -> None:
    """A loss that compares the two samples of a group must find both in its micro-batch."""
    if not config.compares_pairs:
        return
    name = type(config.loss).__name__
    if config.dataset == STORED:
        raise ConfigError(
            key="data.rollouts",
            got=config.data.rollouts,
            because=f"{name} compares the two samples of a pair, and stored groups may have any size",
            fix="Use data.rollouts=null and algorithm.source=preferences with a file of pairs",
        )
    if config.group_size != 2:
        raise ConfigError(
            key="algorithm.source",
            got=config.algorithm.source,
            because=f"{name} compares the two samples of a pair, and {config.group_size} samples come of one row",
            fix="Use algorithm.source=preferences, or rollouts with rollout.n=2",
        )
    if config.advantage is not None and not _tells_pairs_apart(config.advantage):
        raise ConfigError(
            key="advantage",
            got=name_of(type(config.advantage)),
            because=f"{name} reads in its sign which of the two samples of a pair is better, and it does not give "
            "every better one a positive and every worse one a negative number",
            fix="Use advantage=grpo",
        )
    if config.algorithm.mask_truncated:
        raise ConfigError(
            key="algorithm.mask_truncated",
            got=True,
            because=f"{name} compares the two samples of a pair, and the other one of a sample that was cut would be "
            "compared with nothing",
            fix="Use false",
        )
    if not config.batching.keep_groups:
        raise ConfigError(
            key="batching.keep_groups",
            got=False,
            because=f"{name} compares the two samples of a pair, which may then be in different micro-batches",
            fix="Use true",
        )
