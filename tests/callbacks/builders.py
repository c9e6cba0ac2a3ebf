"""Real facts, iterations and contexts, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlmodule.batching.sampler import BalancedSampler, BatchingConfig
from rlmodule.callbacks.parts.context import RunContext
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, Sample, SampleMeta, ScoredSample
from rlmodule.experience.iteration import Experience, Iteration
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import SampleTable
from rlmodule.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def info(
    sample_id: int,
    reward: float | None,
    *,
    group: int = 0,
    prompt_len: int = 4,
    response_len: int = 2,
    truncated: bool = False,
    is_padding: bool = False,
    **parts: float,
) -> SampleInfo:
    meta = SampleMeta(sample_id, group, prompt_len, response_len, response_len, is_padding)
    return SampleInfo(meta, reward, parts, truncated)


def iteration_of(sample_info: Sequence[SampleInfo], advantages: Sequence[float] | None = None) -> Iteration:
    sampler = BalancedSampler(
        [f.meta for f in sample_info], BatchingConfig(mini_batch_size=8), Layout(), seed=0, iteration=0
    )
    held = None if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return Iteration(SampleTable.of(sample_info), held, Experience({}, 0, len(sample_info)), sampler)


def scored(sample_id: int, prompt: str, response: str, reward: float | None, **parts: float) -> ScoredSample:
    ids = torch.tensor(TOKENIZER.encode(response), dtype=torch.int64)
    sample = Sample(
        sample_id=sample_id,
        group_id=sample_id // 2,
        prompt=Prompt(row=0, ids=tuple(TOKENIZER.encode(prompt)), text=prompt, answer="12", source="sort"),
        response_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        rollout_logprob=torch.full(ids.shape, -0.1),
        text=response,
    )
    return ScoredSample(sample, RewardResult(reward, parts))


def context_in(
    run_dir: Path, *, is_rank_zero: bool = True, resumed_step: int | None = None, iterations: int = 2
) -> RunContext:
    return RunContext(
        run_dir=run_dir,
        is_rank_zero=is_rank_zero,
        max_iterations=iterations,
        describe={"model": "tiny"},
        hparams={"seed": 0, "optimizer.lr": 1e-4, "data.files": ["a", "b"], "resume": None, "flag": True},
        resumed_step=resumed_step,
        tokenizer=TOKENIZER,
    )
