"""What every rollout engine is made of: its own settings, and what a run tells all engines alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rlmodule.core.contract import RolloutEngine, Strategy
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
    """

    sampling: SamplingConfig
    end_tokens: EndTokens
    tokenizer: PreTrainedTokenizerBase
    strategy: Strategy
    device: torch.device


class EngineConfig(Protocol):
    """The settings of one engine. Frozen dataclass whose fields are its own config keys; sampling is not among them."""

    def connect(self, context: EngineContext) -> RolloutEngine:
        """The engine of a run, not started yet."""
