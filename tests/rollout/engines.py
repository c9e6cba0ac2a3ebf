"""In-process engines around models small enough to check, and what they sample as samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.types import Prompt, Sample
from rlmodule.data.end_tokens import EndTokens
from rlmodule.rollout.hf import HFEngine, HFRolloutConfig
from rlmodule.rollout.parts.engine import EngineContext
from rlmodule.rollout.parts.sampling import SamplingConfig
from tests.helpers.tiny import single

END = 1  # what the tiny vocabulary ends a response with
LIMIT = 10


class TinyTokenizer:
    """What an engine asks of a tokenizer, for a vocabulary of 64 numbers."""

    eos_token_id = END
    pad_token_id = 0
    name_or_path = "tiny"
    all_special_ids = (END,)

    def save_pretrained(self, folder: Any) -> None:
        """Nothing: who loads the folder needs no words."""

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(str(int(i)) for i in ids if not (skip_special_tokens and int(i) == END))


def engine_of(
    policy: Any,
    *,
    tokenizer: Any = None,
    ends: EndTokens | None = None,
    strategy: Any = None,
    run_dir: Path = Path(),
    max_batch_size: int = 1024,
    cache_gb: float | str | None = None,
    lookup: int = 0,
    **sampling: Any,
) -> HFEngine:
    """The engine of a run of this policy, on one process unless another strategy is given."""
    context = EngineContext(
        SamplingConfig(**sampling),
        ends or EndTokens((END,)),
        tokenizer or TinyTokenizer(),
        strategy or single({"policy": policy}),
        torch.device("cpu"),
        policy,
        run_dir,
    )
    return HFRolloutConfig(max_batch_size=max_batch_size, cache_gb=cache_gb, lookup=lookup).connect(context)


def ask(prompt: Prompt, sample_id: int, *, max_tokens: int = LIMIT, group: int | None = None, **keys: Any) -> Any:
    """A request for one response to ``prompt``, whose row is its group unless said otherwise."""
    return GenerationRequest(prompt.ids, sample_id, prompt.row if group is None else group, max_tokens, **keys)


def generate(engine: HFEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """All completions, in the order of the requests."""
    found = {completion.sample_id: completion for completion in engine.generate(requests)}
    assert len(found) == len(requests)
    return [found[request.sample_id] for request in requests]


def as_sample(request: GenerationRequest, completion: Completion, **prompt: Any) -> Sample:
    """The request and its completion as they are trained on."""
    return Sample(
        sample_id=completion.sample_id,
        group_id=request.group_id,
        prompt=Prompt(row=request.group_id, ids=request.prompt_ids, text="", **prompt),
        response_ids=completion.token_ids,
        loss_mask=torch.ones_like(completion.token_ids, dtype=torch.bool),
        rollout_logprob=completion.logprobs,
        finish_reason=completion.finish_reason,
        text=completion.text,
    )
