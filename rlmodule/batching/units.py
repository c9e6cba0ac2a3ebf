"""Units of planning: single samples, or whole groups that stay in one micro-batch (``batching.keep_groups``).

Shapes: ``[n]`` per sample, ``[u]`` per unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.membership import numbered_by_appearance
from rlmodule.batching.packing import Packing
from rlmodule.batching.partition import Ints
from rlmodule.batching.shared_prompts import with_shared_prompts
from rlmodule.batching.workload import Floats, Numbers, Workload, as_floats
from rlmodule.core.sample_metas import SampleMetas

Lengths = NDArray[Any]  # int32 or int64
Packer = Callable[[Floats, Lengths], Packing]  # ([u] cost, [u] tokens) -> packing of the units


@dataclass(frozen=True, eq=False)
class Units:
    """The samples of an iteration and the unit of each.

    Args:
        unit: [n] int64 unit of each sample, numbered from 0 in order of first appearance; None where each sample is a
            unit by itself.
        is_computed: [n] bool, False for skipped samples.
        length: [n] int tokens that a sample adds to the micro-batch of its unit.
        cost: [n] float64 cost that a sample adds to that micro-batch.
        own_cost: [n] float64 cost without shared prompts; membership uses it, so that sharing does not change it.
    """

    unit: Ints | None
    is_computed: NDArray[np.bool_]
    length: Lengths
    cost: Floats
    own_cost: Floats

    @property
    def sizes(self) -> Ints:
        """[u] samples of each unit."""
        return np.ones(len(self.length), np.int64) if self.unit is None else np.bincount(self.unit)

    @property
    def largest(self) -> int:
        """Samples of the largest unit; 1 if there are no units."""
        return 1 if self.unit is None else int(self.sizes.max(initial=1))

    @property
    def tokens(self) -> Floats:
        """[u] tokens of each unit in a micro-batch."""
        tokens = np.where(self.is_computed, self.length, 0)
        return tokens.astype(np.float64) if self.unit is None else _sums(self.unit, tokens)

    def computed(self, samples: Ints) -> Ints:
        """Those of the samples (positions, [n]) that are computed."""
        is_computed = self.is_computed[samples]
        return samples if is_computed.all() else samples[is_computed]

    def own_costs(self, order: Ints) -> Floats:
        """[u] cost of each unit without shared prompts; ``order`` is that of the data, in which units are numbered."""
        return self.own_cost[order] if self.unit is None else _sums(self.unit[order], self.own_cost[order])

    def of_samples(self, block_of_unit: Ints, order: Ints) -> Ints:
        """[u] block of each unit -> [n] block of each sample, in the order of the data."""
        return block_of_unit if self.unit is None else block_of_unit[self.unit[order]]

    def pack(self, samples: Ints, packer: Packer) -> Packing:
        """Pack the given samples (positions, [n]) with each unit as one item."""
        if self.unit is None:
            return packer(self.cost[samples], self.length[samples])
        _, item = np.unique(self.unit[samples], return_inverse=True)
        packing = packer(_sums(item, self.cost[samples]), _sums(item, self.length[samples]).astype(np.int64))
        return replace(packing, cell=packing.cell[item])


def units_of(
    metas: SampleMetas, order: Ints, cost: Workload | Numbers, *, keep_groups: bool, share_prompts: bool
) -> Units:
    """Compute the units with their tokens and costs.

    Args:
        metas: the samples, [n].
        order: [n] their positions in the order of the data.
        cost: cost model, or [n] the cost of each sample.
        keep_groups: a unit is a group instead of a sample.
        share_prompts: a unit computes its prompt once. Has an effect with ``keep_groups`` only, because otherwise it is
            not known before planning which samples share a micro-batch.
    """
    is_computed, length = ~metas.is_skipped, metas.length
    own_cost = _costs(metas, length, cost)
    if not keep_groups:
        return Units(None, is_computed, length, own_cost, own_cost)
    place = np.argsort(order)  # of each sample in the data
    group = numbered_by_appearance(metas.group_id[order])
    if not share_prompts:
        return Units(group[place], is_computed, length, own_cost, own_cost)
    assert isinstance(cost, Workload), (
        "share_prompts with keep_groups needs a Workload: costs per sample do not tell the cost of a prompt"
    )
    in_order = metas.take(order)
    tokens, shared = with_shared_prompts(in_order, group, in_order.length.astype(np.int64), own_cost[order], cost)
    return Units(group[place], is_computed, tokens[place], shared[place], own_cost)


def _costs(metas: SampleMetas, length: Lengths, cost: Workload | Numbers) -> Floats:
    if isinstance(cost, Workload):
        return cost.cost(length, metas.loss_tokens)
    costs = as_floats(cost)
    assert costs.shape == length.shape, f"one cost per sample: {len(length)} samples, costs of shape {costs.shape}"
    assert (np.isfinite(costs) & (costs >= 0)).all(), "costs are finite and not negative"
    return costs


def _sums(unit: Ints, values: Floats | Lengths) -> Floats:
    """[n] value of each sample -> [u] float64 sum over each unit."""
    return np.bincount(unit, weights=values).astype(np.float64, copy=False)
