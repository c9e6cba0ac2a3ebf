"""What is made of the differences between rollout engine and trainer: weights, rejections and numbers to watch.

The maths is in ``algorithm/rollout_{correction,rejection,mismatch}.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.rollout_correction import correction_weights, unbounded_weights
from rlmodule.algorithm.rollout_mismatch import ComparedResponse, mismatch_metrics, mismatch_parts
from rlmodule.algorithm.rollout_rejection import kept_tokens
from rlmodule.core.contract import Collectives
from rlmodule.core.metrics import merge_rows, to_rows
from rlmodule.core.types import SampleMeta, TrainingSample
from rlmodule.experience.redistribute import all_gather_dict
from rlmodule.experience.sample_table import SampleTable


def compared(
    rows: dict[int, TrainingSample],
    counted: Collection[int],
    config: AlgorithmConfig,
    collectives: Collectives,
    metrics: dict[str, float],
) -> tuple[dict[int, TrainingSample], dict[int, Tensor]]:
    """(rows with weights, position -> [n] bool loss tokens that are not rejected); adds ``rollout_corr/*``.

    Ranks that share a row all have it; ``counted`` are the positions that this one counts in the metrics, so that each
    row counts once. Without comparison the rows are the same, and nothing is kept or rejected.
    """
    if not config.compares_rollouts:
        return rows, {}
    responses = {position: _compare(row, config) for position, row in rows.items()}
    names, parts = to_rows(mismatch_parts([responses[position] for position in counted]))
    metrics |= mismatch_metrics(merge_rows(names, collectives.gather_rows(parts)))
    if config.rollout_correction.mode in ("truncate", "mask"):
        # Rejected tokens leave the loss anyway; the weight tells advantage estimators.
        rows = {p: _weighted(row, responses[p].weight * responses[p].kept) for p, row in rows.items()}
    return rows, {p: response.kept for p, response in responses.items()}


def _compare(row: TrainingSample, config: AlgorithmConfig) -> ComparedResponse:
    assert row.old_logprob is not None, "the correction compares with the trainer's scores"
    assert row.sample.rollout_logprob is not None, "checked when it was collected"
    mask, correction = row.sample.loss_mask, config.rollout_correction
    old, rollout = row.old_logprob[mask], row.sample.rollout_logprob[mask]
    weight, unbounded = correction_weights(old, rollout, correction), unbounded_weights(old, rollout, correction)
    return ComparedResponse(old, rollout, weight, unbounded, kept_tokens(old, rollout, config.rollout_rejection))


def _weighted(row: TrainingSample, weight: Tensor) -> TrainingSample:
    mask = row.sample.loss_mask
    return replace(row, rollout_weight=torch.ones(len(mask)).masked_scatter_(mask, weight.float()))


def without_rejected_rewards(
    sample_info: SampleTable, kept: Mapping[int, Tensor], collectives: Collectives
) -> SampleTable:
    """Facts for the advantages: a response that is rejected as a whole leaves its group, as if it had no reward."""
    left = all_gather_dict({p: int(mask.sum()) for p, mask in kept.items()}, collectives)
    gone = np.array([p for p, tokens in left.items() if tokens == 0], np.int64)
    is_rejected = np.isin(np.arange(len(sample_info)), gone) & (sample_info.metas.loss_tokens > 0)
    return replace(sample_info, reward=np.where(is_rejected, np.nan, sample_info.reward))


def without_rejected(rows: Mapping[int, TrainingSample], kept: Mapping[int, Tensor]) -> dict[int, TrainingSample]:
    """Rows whose loss masks leave out what was rejected."""

    def left(row: TrainingSample, tokens: Tensor) -> TrainingSample:
        mask = row.sample.loss_mask
        return replace(row, sample=replace(row.sample, loss_mask=torch.zeros_like(mask).masked_scatter_(mask, tokens)))

    return {position: left(row, kept[position]) for position, row in rows.items()}


def recounted(
    sample_info: SampleTable, rows: Mapping[int, TrainingSample], *, needs_advantage: bool
) -> dict[int, SampleMeta]:
    """Position -> metas of these rows, by the loss masks that they have now.

    Args:
        sample_info: facts of all samples.
        rows: some of them, with advantages where the loss reads them.
        needs_advantage: samples with an advantage of 0 on every loss token have no gradient.
    """
    metas = {}
    for position, row in rows.items():
        mask, advantage = row.sample.loss_mask, row.advantage
        is_zero = needs_advantage and advantage is not None and not bool((advantage[mask] != 0).any())
        tokens = int(mask.sum())
        has_gradient = tokens > 0 and not is_zero
        metas[position] = replace(sample_info.metas[position], loss_tokens=tokens, has_gradient=has_gradient)
    return metas
