"""Units of planning: single samples, or whole groups that stay in one micro-batch (``batching.keep_groups``).

Shapes: ``[n]`` per sample, ``[u]`` per unit.
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
from rlmodule.core.sample_metas import SampleMetas
from rlmodule.core.types import SampleMeta

Packer = Callable[[Floats, Ints], Packing]  # ([u] cost, [u] tokens) -> packing of the units


@dataclass(frozen=True, eq=False)
class Units:
    """The samples of an iteration and the unit of each.

    Args:
        unit: [n] int64 unit of each sample, numbered from 0 in order of first appearance.
        is_computed: [n] bool, False for skipped samples.
        length: [n] int64 tokens that a sample adds to the micro-batch of its unit.
        cost: [n] float64 cost that a sample adds to that micro-batch.
        own_cost: [n] float64 cost without shared prompts; membership uses it, so that sharing does not change it.
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
        """Samples of the largest unit; 1 if there are no units."""
        return int(self.sizes.max(initial=1))

    @property
    def tokens(self) -> Floats:
        """[u] tokens of each unit in a micro-batch."""
        return _sums(self.unit, np.where(self.is_computed, self.length, 0))

    @property
    def own_costs(self) -> Floats:
        """[u] cost of each unit without shared prompts."""
        return _sums(self.unit, self.own_cost)

    def pack(self, samples: Ints, packer: Packer) -> Packing:
        """Pack the given samples (positions, [n]) with each unit as one item."""
        if len(self.unit) == int(self.unit.max(initial=-1)) + 1:  # each sample is a unit
            return packer(self.cost[samples], self.length[samples])
        _, item = np.unique(self.unit[samples], return_inverse=True)
        packing = packer(_sums(item, self.cost[samples]), _sums(item, self.length[samples]).astype(np.int64))
        return replace(packing, cell=packing.cell[item])


def units_of(metas: Sequence[SampleMeta], cost: Workload | Numbers, *, keep_groups: bool, share_prompts: bool) -> Units:
    """Compute the units with their tokens and costs.

    Args:
        metas: the samples, [n].
        cost: cost model, or [n] the cost of each sample.
        keep_groups: a unit is a group instead of a sample.
        share_prompts: a unit computes its prompt once. Has an effect with ``keep_groups`` only, because otherwise it is
            not known before planning which samples share a micro-batch.
    """
    columns = SampleMetas.of(metas)
    is_computed, length = ~columns.is_skipped, columns.length
    own_cost = _costs(columns, length, cost)
    if not keep_groups:
        return Units(np.arange(len(metas)), is_computed, length, own_cost, own_cost)
    group = numbered_by_appearance(columns.group_id)
    if not share_prompts:
        return Units(group, is_computed, length, own_cost, own_cost)
    assert isinstance(cost, Workload), (
        "share_prompts with keep_groups needs a Workload: costs per sample do not tell the cost of a prompt"
    )
    return Units(group, is_computed, *with_shared_prompts(metas, group, length, own_cost, cost), own_cost)


def _costs(metas: SampleMetas, length: Ints, cost: Workload | Numbers) -> Floats:
    if isinstance(cost, Workload):
        return cost.cost(length, metas.loss_tokens)
    costs = as_floats(cost)
    assert costs.shape == length.shape, f"one cost per sample: {len(length)} samples, costs of shape {costs.shape}"
    assert (np.isfinite(costs) & (costs >= 0)).all(), "costs are finite and not negative"
    return costs


def _sums(unit: Ints, values: Floats | Ints) -> Floats:
    """[n] value of each sample -> [u] float64 sum over each unit."""
    return np.bincount(unit, weights=values).astype(np.float64, copy=False)
