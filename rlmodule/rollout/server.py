"""Sampling by running servers of another make: SGLang, or any with OpenAI's completions and token ids.

They read new weights from a folder that they see under the same path. What a server cannot do is said at the start.
Leaves out starting them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlmodule.core.config import one_of
from rlmodule.core.errors import ConfigError
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.completions import CompletionsApi
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.server_engine import ServerEngine
from rlmodule.rollout.parts.server_settings import ServerSettings
from rlmodule.rollout.parts.sglang_api import SGLangApi
from rlmodule.rollout.parts.weight_folder import WeightFolder, choose_root

DIALECTS: Mapping[str, type[SGLangApi | CompletionsApi]] = {"sglang": SGLangApi, "openai": CompletionsApi}


@ROLLOUTS.register
@dataclass(frozen=True)
class ServerRolloutConfig(ServerSettings):
    """Settings of sampling by running servers."""

    api: str = "sglang"  # how they are asked: sglang (/generate), or openai (/v1/completions with token ids)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("api", self.api, DIALECTS)
        if not self.urls:
            raise ConfigError(
                key="url",
                got=self.url,
                because="rollout=server uses servers that run already",
                fix="Use url=http://HOST:PORT, or rollout=vllm, which starts its own",
            )

    @property
    def own_pauses(self) -> tuple[str, ...]:
        """SGLang cuts off; of responses that go on it does not say which weights drew which token."""
        return DIALECTS[self.api].pauses

    def connect(self, context: EngineContext) -> ServerEngine:
        """The engine of a run; adapters are merged for it."""
        dtype = self.promised_dtype(context.policy.compute_dtype)
        root = Path()
        if context.strategy.layout.is_rank_zero:
            root = choose_root(self.weights_dir, context.policy, dtype, context.run_dir, is_local=False)
        folder = WeightFolder(root, context.policy, context.tokenizer, dtype)
        return ServerEngine(self, context, DIALECTS[self.api], folder)
