"""The rollout engine of a run, from its settings; nothing is started before it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlmodule.core.contract import RolloutEngine, Strategy
from rlmodule.core.episodes import WAIT
from rlmodule.core.types import POLICY
from rlmodule.data.end_tokens import EndTokens
from rlmodule.experience.canary import Canary, PolicyScores
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.models.policy import PolicyModel
from rlmodule.rollout.parts.engine import EngineConfig, EngineContext
from rlmodule.rollout.parts.sampling import SamplingConfig


def build_engine(
    engine: EngineConfig,
    sampling: SamplingConfig,
    end_tokens: Callable[[], EndTokens],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
    models: Mapping[str, nn.Module],
    run_dir: Path,
    version: Callable[[], int] = lambda: 0,
    *,
    pause: str = WAIT,
) -> LiveEngine:
    """What samples responses, and proves after every update that it has the policy's weights.

    Args:
        engine: its own settings.
        sampling: how responses are drawn.
        end_tokens: gives where they end.
        tokenizer: of the policy.
        strategy: holds the policy once it is set up.
        models: of the run, as they were built.
        run_dir: for logs, and weights on their way.
        version: iterations of training behind the policy's weights now.
        pause: what becomes of responses under way when they change.
    """

    def connect() -> RolloutEngine:
        policy = models[POLICY]
        assert isinstance(policy, PolicyModel), "responses are sampled from a policy"
        return engine.connect(
            EngineContext(sampling, end_tokens(), tokenizer, strategy, strategy.root_device, policy, run_dir, pause)
        )

    def say(line: str) -> None:
        if strategy.layout.is_rank_zero:
            print(line, flush=True)

    canary = Canary(PolicyScores(strategy, tokenizer.pad_token_id or 0), say)
    return LiveEngine(connect, partial(strategy.full_weights, POLICY), version, canary)
