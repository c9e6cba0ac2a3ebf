"""Selects tokens out of a whole mini-batch, for losses that treat some tokens differently; the same tokens for any cut.

It takes two small exchanges between ranks: sums for the means, then each rank's best candidates. Leaves out the
priority of a token and what is done with selected ones, which the loss says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlmodule.core.contract import Collectives, SelectingLoss, Strategy
from rlmodule.core.types import LossInputs, MicroBatch, MiniBatch, TokenMeans

if TYPE_CHECKING:  # types alone
    from rlmodule.batching.row_limit import RowLimit


def with_selection(
    mini_batch: MiniBatch, loss: SelectingLoss, name: str, strategy: Strategy, row_limit: RowLimit | None = None
) -> MiniBatch:
    """The mini-batch with ``selected`` filled in each of its micro-batches.

    Costs one forward pass over the mini-batch: log-probabilities are those that the model ``name`` gives before the
    update, in the micro-batches that the update will run.
    """
    batches = mini_batch.micro_batches
    score = strategy.forward if row_limit is None else partial(row_limit.forward, strategy)
    outputs = score(name, batches, frozenset({"logprob"}))
    inputs = [LossInputs.of(batch, output["logprob"]) for batch, output in zip(batches, outputs, strict=True)]
    keys = [_keys(batch) for batch in batches]
    means = _means(inputs, strategy.collectives)
    priorities = [loss.priority(x, means, key) for x, key in zip(inputs, keys, strict=True)]
    chosen = highest(priorities, keys, loss.num_selected(mini_batch.totals.tokens), strategy.collectives)
    return replace(
        mini_batch,
        micro_batches=tuple(replace(batch, selected=mask) for batch, mask in zip(batches, chosen, strict=True)),
    )


def _keys(batch: MicroBatch) -> Tensor:
    """[N, 2] int64: sample id and position of each loss token, which do not depend on the cut."""
    assert batch.sample_id is not None, "selected tokens are identified by their sample"
    return torch.stack([batch.sample_id[batch.sequence], batch.position_ids[batch.loss_positions]], dim=1)


def _means(inputs: Sequence[LossInputs], collectives: Collectives) -> TokenMeans:
    parts = [
        (x.logprob, x.advantage) for x in inputs if x.advantage is not None
    ]  # a dummy has neither tokens nor values
    sums = [(len(p), p.double().sum().item(), a.double().sum().item()) for p, a in parts]
    rows = torch.tensor(sums, dtype=torch.float64).reshape(-1, 3).sum(0, keepdim=True)
    count, logprob, advantage = collectives.gather_rows(rows).sum((0, 1)).tolist()
    return TokenMeans(logprob / max(count, 1.0), advantage / max(count, 1.0))


def highest(priorities: Sequence[Tensor], keys: Sequence[Tensor], count: int, collectives: Collectives) -> list[Tensor]:
    """Mark the ``count`` entries of highest priority over all parts and all ranks.

    Args:
        priorities: [N] float64 of each part; minus infinity is never marked.
        keys: [N, 2] int64 of each part, unique over all ranks; breaks ties, smaller ones first.
        count: entries to mark, fewer if fewer are eligible.

    Returns:
        [N] bool of each part.
    """
    here = [(p.cpu(), k.cpu()) for p, k in zip(priorities, keys, strict=True)]
    priority = torch.cat([torch.empty(0, dtype=torch.float64), *(p for p, _ in here)])
    key = torch.cat([torch.empty(0, 2, dtype=torch.int64), *(k for _, k in here)])
    best = _first(priority, key, count)
    everyone = collectives.gather_objects((priority[best].numpy(), key[best].numpy()))
    candidates = torch.cat([torch.from_numpy(p) for p, _ in everyone])
    candidate_keys = torch.cat([torch.from_numpy(k) for _, k in everyone])
    winners = {tuple(k) for k in candidate_keys[_first(candidates, candidate_keys, count)].tolist()}
    mask = torch.zeros(len(priority), dtype=torch.bool)
    for place in best.tolist():
        mask[place] = tuple(key[place].tolist()) in winners
    sizes = [len(p) for p, _ in here]
    return [part.to(p.device) for part, p in zip(torch.split(mask, sizes), priorities, strict=True)]


def _first(priority: Tensor, key: Tensor, count: int) -> Tensor:
    """Indices of the first ``count`` entries by descending priority, then ascending key."""
    eligible = (priority > -torch.inf).nonzero().squeeze(1)
    for column in (key[:, 1], key[:, 0], -priority):  # stable sorts, the last one leads
        eligible = eligible[column[eligible].argsort(stable=True)]
    return eligible[:count]
