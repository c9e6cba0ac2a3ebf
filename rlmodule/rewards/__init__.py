"""Reward functions: one file each. Leaves out what is made of the scores (``experience/``)."""

from rlmodule.core.contract import Reward
from rlmodule.core.registry import Registry

REWARDS: Registry[Reward] = Registry("reward", "rlmodule.rewards")
