"""What is planned as one: every sample by itself, or the samples of a group together.

Numbers of samples are ``[n]``, numbers of units ``[u]``. Leaves out what units are packed for (``plan.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.membership import numbered_by_appearance
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints
from rlmodule.batching.shared_prompts import with_shared_prompts
from rlmodule.batching.workload import Floats, Numbers, Workload, as_floats
from rlmodule.core.types import SampleMeta

Packer = Callable[[Floats, Ints], Packing]  # [u] cost and tokens of what is packed -> where it sits


@dataclass(frozen=True, eq=False)
class Units:
    """The samples of an iteration and which of them stay together.

    Args:
        unit: [n] int64 unit of each sample, numbered from 0 in the order of the samples.
        is_computed: [n] bool, False where a sample is left out.
        length: [n] int64 tokens that a sample adds to the micro-batch of its unit.
        cost: [n] float64 what it adds to the cost of that micro-batch.
        own_cost: [n] float64 what it costs by itself: whether prompts are shared changes no membership.
    """

    unit: Ints
    is_computed: NDArray[np.bool_]
    length: Ints
    cost: Floats
    own_cost: Floats

    @property
    def sizes(self) -> Ints:
        """[u] samples of each unit."""
        return np.bincount(self.unit)

    @property
    def largest(self) -> int:
        """Samples of the largest unit; 1 without any."""
        return int(self.sizes.max(initial=1))

    @property
    def tokens(self) -> Floats:
        """[u] tokens of each unit in a micro-batch."""
        return _sums(self.unit, np.where(self.is_computed, self.length, 0))

    @property
    def own_costs(self) -> Floats:
        """[u] what the samples of each unit cost by themselves."""
        return _sums(self.unit, self.own_cost)

    def packed(self, samples: Ints, pack: Packer) -> Packing:
        """Some samples in micro-batches, those of a unit in one: each unit is packed as one item."""
        _, item = np.unique(self.unit[samples], return_inverse=True)
        packing = pack(_sums(item, self.cost[samples]), _sums(item, self.length[samples]).astype(np.int64))
        return replace(packing, cell=packing.cell[item])


def units_of(metas: Sequence[SampleMeta], cost: Workload | Numbers, *, keep_groups: bool, share_prompts: bool) -> Units:
    """Measure the samples.

    Args:
        metas: the samples, [n].
        cost: says what each costs, or [n] numbers that do.
        keep_groups: a unit is a group, not a sample.
        share_prompts: a unit computes its prompt once; read with ``keep_groups`` alone, without which the plan does
            not know beforehand who shares.
    """
    is_computed = np.fromiter((not m.is_skipped for m in metas), np.bool_, len(metas))
    length = np.fromiter((m.length for m in metas), np.int64, len(metas))
    own_cost = _costs(metas, length, cost)
    if not keep_groups:
        return Units(np.arange(len(metas)), is_computed, length, own_cost, own_cost)
    group = numbered_by_appearance(np.fromiter((m.group_id for m in metas), np.int64, len(metas)))
    if not share_prompts:
        return Units(group, is_computed, length, own_cost, own_cost)
    assert isinstance(cost, Workload), "numbers do not say what a prompt costs"
    return Units(group, is_computed, *with_shared_prompts(metas, group, length, own_cost, cost), own_cost)


def _costs(metas: Sequence[SampleMeta], length: Ints, cost: Workload | Numbers) -> Floats:
    if isinstance(cost, Workload):
        return cost.cost(length, np.fromiter((m.loss_tokens for m in metas), np.int64, len(metas)))
    costs = as_floats(cost)
    assert costs.shape == length.shape, f"one cost per sample: {len(length)} samples, costs of shape {costs.shape}"
    assert (np.isfinite(costs) & (costs >= 0)).all(), "costs are finite and not negative"
    return costs


def _sums(unit: Ints, values: Floats | Ints) -> Floats:
    """[n] a number per sample -> [u] its sum over each unit."""
    return np.bincount(unit, weights=values).astype(np.float64, copy=False)
