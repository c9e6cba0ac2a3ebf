"""Weights samples by what the sampler and the trainer disagree on; the maths is in ``algorithm/rollout_correction``."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlmodule.algorithm.rollout_correction import RolloutCorrection, correction_weights, mismatch_metrics, mismatch_sums
from rlmodule.core.contract import Collectives
from rlmodule.core.types import TrainingSample


def corrected(
    rows: dict[int, TrainingSample], config: RolloutCorrection, collectives: Collectives, metrics: dict[str, float]
) -> dict[int, TrainingSample]:
    """Rows with a weight for what the sampler and the trainer disagree on; adds to ``metrics`` how much they do."""
    if not config.is_on:
        return rows
    seen, weighted = [], dict(rows)
    for position, row in rows.items():
        assert row.old_logprob is not None, "the correction compares with the trainer's scores"
        assert row.sample.rollout_logprob is not None, "checked when it was collected"
        mask = row.sample.loss_mask
        old, sampler = row.old_logprob[mask], row.sample.rollout_logprob[mask]
        weight = correction_weights(old, sampler, config)
        seen.append((old, sampler, weight))
        if config.mode != "observe":
            spread = torch.ones(len(mask)).masked_scatter_(mask, weight.float())
            weighted[position] = replace(row, rollout_weight=spread)
    sums = torch.cat([mismatch_sums(seen, config), torch.tensor([float(sum(len(o) > 0 for o, _, _ in seen))])])
    total = collectives.gather_rows(sums[None].double()).sum((0, 1))
    metrics |= mismatch_metrics(total[:-1], int(total[-1]))
    return weighted
