"""Iterations of made-up responses, whose numbers can be worked out by hand."""

from dataclasses import replace

import torch

from rlmodule.advantages.grpo import GRPO
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.objective import Objective
from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.core.types import RewardResult, ScoredSample
from rlmodule.experience.advantage_stage import AdvantageStage
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.scoring import Scorer
from rlmodule.experience.timer import Timer
from rlmodule.losses.ppo_clip import PPOClip
from strategies.parts.mesh import current_layout
from tests.helpers.tiny import ddp, sample, single, tiny_policy

CENTRED = GRPO(normalize_by_std=False)
# Rounds of sampling: group -> rewards of its two responses; ids go on counting.
ROUNDS = (
    {0: (1.0, 1.0), 1: (1.0, 0.0), 2: (0.0, 0.0)},
    {3: (0.5, None), 4: (0.0, 1.0), 5: (0.0, 0.25)},
    {6: (1.0, 0.0), 7: (1.0, 0.0), 8: (1.0, 0.0)},
)


def drawn(group, rewards, baseline=None):
    """Responses of 2, 3, ... tokens; every third is cut at the limit; the sampler's log-probabilities are made up."""
    out = []
    for place, reward in enumerate(rewards):
        item = sample(2 * group + place, 3, 2 + (2 * group + place) % 5, group=group)
        rng = torch.Generator().manual_seed(item.sample_id)
        item = replace(
            item,
            rollout_logprob=-4 + 0.5 * torch.randn(len(item.response_ids), generator=rng),
            finish_reason="length" if item.sample_id % 3 == 2 else "stop",
        )
        out.append(ScoredSample(item, RewardResult(reward), baseline))
    return out


def iteration_of(
    rank, *, rounds=ROUNDS[:1], loss=None, advantage=CENTRED, controller=None, baseline=None, budget=16384, **algorithm
):
    """(maker, iteration) of made-up responses; the policy and the reference are random."""
    layout = current_layout()
    models = {"policy": tiny_policy(), "reference": tiny_policy(seed=1).requires_grad_(False)}
    strategy = (single if layout.world_size == 1 else ddp)(models)
    to_come = iter(rounds)

    def collect():
        groups = list(next(to_come).items())[layout.dp_rank :: layout.dp_size]
        return [scored for group, rewards in groups for scored in drawn(group, rewards, baseline)]

    objective = Objective(loss or PPOClip(), AlgorithmConfig(**algorithm))
    batching = BatchingConfig(mini_batch_size=4, max_token_len_per_gpu=budget)
    maker = ExperienceMaker(
        Scorer(strategy, objective, DynamicCollator(), torch.device("cpu")),
        AdvantageStage(objective, advantage, strategy.collectives, controller),
        lambda metas: BalancedSampler(metas, batching, layout, seed=0, iteration=0),
    )
    return maker, maker(collect, Timer())
