"""Engines of servers around a tiny policy, with the proof that a run makes of every update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlmodule.core.episodes import WAIT
from rlmodule.core.types import POLICY
from rlmodule.data.end_tokens import EndTokens
from rlmodule.experience.canary import Canary, PolicyScores
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.models.policy import PolicyModel
from rlmodule.models.served import base_weights, merged_weights, write_model
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.rollout.vllm import VLLMRolloutConfig
from tests.helpers.tiny import single, stock
from tests.rollout.engines import END, LIMIT, TinyTokenizer
from tests.rollout.small_server import Server

MAX_PROMPT = 16
FEW_DRAWS = 8  # with which a server is proven, less than a run has
PATIENCE = 30.0  # seconds until a thread is taken for hanging
FILE_BYTES = 20_000  # of weights: the tiny model has several files


class Served:
    """A policy, the engine that samples it, and what they said."""

    def __init__(
        self,
        policy: PolicyModel,
        config: Any,
        run_dir: Path,
        *,
        strategy: Any = None,
        ends: EndTokens | None = None,
        pause: str = WAIT,
        **sampling: Any,
    ) -> None:
        self.policy, self.strategy = policy, strategy or single({POLICY: policy})
        self.version, self.said = 0, list[str]()
        context = EngineContext(
            SamplingConfig(max_response_length=LIMIT, **sampling),
            ends or EndTokens((END,)),
            TinyTokenizer(),  # type: ignore[arg-type]
            self.strategy,
            torch.device("cpu"),
            policy,
            run_dir,
            pause,
        )
        canary = Canary(PolicyScores(self.strategy, 0), self.said.append)
        connect = lambda: config.connect(context)  # noqa: E731
        self.engine = LiveEngine(connect, lambda: self.strategy.full_weights(POLICY), lambda: self.version, canary)

    def train(self, change: Callable[[str], float] = lambda name: 0.05) -> None:
        """Change the weights by about as much as ``change`` says for the name of each."""
        rng = torch.Generator().manual_seed(self.version + 1)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=rng) * change(name))
        self.version += 1


def start_weights(policy: PolicyModel, folder: Path) -> Path:
    """A folder that a server starts from."""
    weights = single({POLICY: policy}).full_weights(POLICY)
    stream = merged_weights(policy, weights) if policy.lora is None else base_weights(weights)
    write_model(folder, policy, TinyTokenizer(), stream, torch.float32, file_bytes=FILE_BYTES)  # type: ignore[arg-type]
    return folder


@contextmanager
def served(policy: PolicyModel, tmp_path: Path, *faults: str, servers: int = 1, config: Any = None, **keys: Any) -> Any:
    """(what is served, its servers), around servers in threads."""
    start = start_weights(policy, tmp_path / "start")
    seconds = keys.pop("seconds", 0.0)
    there = [Server(start, faults, seconds=seconds) for _ in range(servers)]
    sampling = {name: keys.pop(name) for name in ("temperature", "top_k", "ends", "strategy", "pause") if name in keys}
    made = config or VLLMRolloutConfig
    config = made(
        url=[server.url for server in there],
        **{"max_prompt_length": MAX_PROMPT, "num_requests": 4, "start_seconds": 5.0, **keys},
    )
    made = Served(policy, config, tmp_path / "run", **sampling)
    try:
        yield made, there
    finally:
        made.engine.close()
        for server in there:
            server.close()


class InThread:
    """Responses that a thread reads."""

    def __init__(self, responder, requests):
        self.found, self.problem = {}, None
        self.thread = threading.Thread(target=self._read, args=(responder, requests), daemon=True)
        self.thread.start()

    def _read(self, responder, requests):
        try:
            for completion in responder.generate(requests):
                self.found[completion.sample_id] = completion
        except Exception as error:
            self.problem = error

    def join(self, patience=PATIENCE):
        self.thread.join(patience)
        assert not self.thread.is_alive(), "it hangs"
        if self.problem is not None:
            raise self.problem
        return self.found


def logprobs_of(policies, request, completion):
    """[R] of each token by the weights that are said to have drawn it."""
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
    versions = completion.versions
    if versions is None:
        versions = torch.full_like(completion.token_ids, completion.version)
    rows = torch.stack([stock(policy)(input_ids=ids).logits[0].log_softmax(-1) for policy in policies])
    places = torch.arange(len(request.prompt_ids) - 1, ids.shape[1] - 1)
    return rows[versions, places, completion.token_ids]
