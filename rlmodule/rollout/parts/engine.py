"""What every rollout engine is made of: its own settings, and what a run tells all engines alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rlmodule.core.contract import RolloutEngine, Strategy
from rlmodule.core.episodes import WAIT
from rlmodule.models.policy import PolicyModel
from rlmodule.rollout.parts.sampling import SamplingConfig

if TYPE_CHECKING:  # types alone
    from rlmodule.data.end_tokens import EndTokens


@dataclass(frozen=True)
class EngineContext:
    """What a run tells its engine.

    Args:
        sampling: how responses are drawn.
        end_tokens: where they end.
        tokenizer: of the policy.
        strategy: holds the policy, under the name ``policy``, and knows where this rank is.
        device: of this rank.
        policy: the model as it was built, for its configuration and its adapters; the strategy has its weights.
        run_dir: of the run, for logs and weights on their way to a server.
        pause: one of PAUSES, what becomes of responses under way when weights change.
    """

    sampling: SamplingConfig
    end_tokens: EndTokens
    tokenizer: PreTrainedTokenizerBase
    strategy: Strategy
    device: torch.device
    policy: PolicyModel
    run_dir: Path
    pause: str = WAIT

    @property
    def vocab_size(self) -> int:
        """Tokens that the policy knows."""
        return int(self.policy.lm.config.get_text_config().vocab_size)


class EngineConfig(Protocol):
    """The settings of one engine. Frozen dataclass whose fields are its own config keys; sampling is not among them.

    ``in_process``: the training processes sample, and need memory for it.
    """

    in_process: ClassVar[bool]

    def places(self, row_bytes: int) -> int | None:
        """Responses drawn side by side at most, each with so many bytes of keys and values; None without a limit."""

    def check_here(self) -> None:
        """Asked where the engine will be started, before anything is trained.

        Raises:
            ConfigError: what it needs is not there.
        """

    @property
    def pauses(self) -> tuple[str, ...]:
        """What it can do with responses under way when weights change; none where it cannot draw beside training."""

    def connect(self, context: EngineContext) -> RolloutEngine:
        """The engine of a run, not started yet."""
