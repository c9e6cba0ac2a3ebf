"""Number partitioning: split numbers into k parts of nearly equal sum by largest differencing.

Karmarkar and Karp 1982; k-way as in Korf 2009. This module knows nothing of samples, ranks or budgets.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import count
from operator import itemgetter, neg
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmodule.batching.workload import Floats, Numbers, as_floats

Ints = NDArray[np.int64]

# Up to this many new sets are inserted by bisection, more are sorted: 8 insertions cost about as much as sorting 64.
FEW_SETS = 8


def karmarkar_karp(costs: Numbers, num_parts: int, equal_size: bool = False) -> list[list[int]]:
    """Partition items by k-way largest differencing.

    A state is ``num_parts`` disjoint sets, largest sum first. The two states with the largest spread (largest minus
    smallest sum) are merged, the i-th largest set of one with the i-th smallest of the other, until one state is left.
    Ties are broken by index for items, by age for states; sets with items precede empty ones and otherwise keep the
    order of the pairing. The result therefore depends on the costs alone.

    Args:
        costs: [n] non-negative cost of each item.
        num_parts: number of parts; parts stay empty only when there are fewer items than parts.
        equal_size: give every part the same number of items, by starting each state with ``num_parts`` consecutive
            items in sorted order; n must be a multiple of ``num_parts``.

    Returns:
        ``num_parts`` lists of item indices, each ascending; parts by falling sum.
    """
    cost = as_floats(costs)
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: at least one part is needed")
    if not (np.isfinite(cost).all() and (cost >= 0).all()):
        raise ValueError("costs must be finite and not negative")
    if equal_size:
        return _equal_size(cost, num_parts)
    return _free_size(cost, num_parts)


def balanced_counts(costs: Numbers, num_parts: int) -> list[list[int]]:
    """Like ``karmarkar_karp`` with ``equal_size``, for any number of items: part sizes differ by at most one.

    Items of cost zero pad the number of items to a multiple of ``num_parts`` and are removed again.
    """
    cost = as_floats(costs)
    padded = np.concatenate([cost, np.zeros(-len(cost) % num_parts)])
    return [[item for item in part if item < len(cost)] for part in karmarkar_karp(padded, num_parts, equal_size=True)]


def by_falling_cost(cost: Floats) -> Ints:
    """[n] costs -> [n] indices by falling cost, equal costs by index."""
    return np.argsort(-cost, kind="stable")


def _equal_size(cost: Floats, num_parts: int) -> list[list[int]]:
    if len(cost) % num_parts:
        raise ValueError(
            f"equal_size needs a multiple of num_parts={num_parts} items, got {len(cost)}; "
            "top the batch up or use balanced_counts"
        )
    if len(cost) == 0:
        return [[] for _ in range(num_parts)]
    age = count()
    # (minus spread, age, sums [k] falling, items [rows, k])
    heap: list[tuple[float, int, Floats, Ints]] = []
    for items in by_falling_cost(cost).reshape(-1, num_parts):
        sums = cost[items]
        heap.append((sums[-1] - sums[0], next(age), sums, items[None]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, sums, items = heapq.heappop(heap)
        _, _, other_sums, other_items = heapq.heappop(heap)
        sums = sums + other_sums[::-1]
        order = by_falling_cost(sums)
        sums = sums[order]
        items = np.concatenate([items, other_items[:, ::-1]])[:, order]
        heapq.heappush(heap, (sums[-1] - sums[0], next(age), sums, items))
    parts: list[list[int]] = np.sort(heap[0][3], axis=0).T.tolist()
    assert all(len(part) * num_parts == len(cost) for part in parts), "parts of equal size"
    return parts


class _Sets(NamedTuple):
    """The non-empty sets of a state, by falling sum; ``nodes`` are their numbers in the tree of merges."""

    sums: list[float]
    nodes: list[int]

    def spread(self, num_parts: int) -> float:
        return self.sums[0] - (self.sums[-1] if len(self.sums) == num_parts else 0.0)


def _free_size(cost: Floats, num_parts: int) -> list[list[int]]:
    # Merging copies no items: a merged set is a node with two children, and the tree is traversed once at the end.
    order = by_falling_cost(cost)
    children: list[tuple[int, int]] = []  # node n + i joins the nodes children[i]
    seeds = (_Sets([value], [item]) for value, item in zip(cost[order].tolist(), order.tolist(), strict=True))
    heap = [(-state.spread(num_parts), age, state) for age, state in enumerate(seeds)]  # sorted, hence a heap
    if not heap:
        return [[] for _ in range(num_parts)]
    age = count(len(heap))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(first, second, num_parts, children, len(cost))
        heapq.heappush(heap, (-merged.spread(num_parts), next(age), merged))
    parts = [_leaves(node, children, len(cost)) for node in heap[0][2].nodes]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _merge(first: _Sets, second: _Sets, num_parts: int, children: list[tuple[int, int]], num_items: int) -> _Sets:
    """Pair the i-th largest set of ``first`` with the i-th smallest of ``second``, empty sets included."""
    alone = min(num_parts - len(first.sums), len(second.sums))  # largest sets of second are paired with empty ones
    sums, nodes = first  # reused: these lists become those of the merged state
    untouched = len(sums) - (len(second.sums) - alone)
    new: list[tuple[float, int]] = []
    for place in range(untouched, len(sums)):
        other = num_parts - 1 - place
        children.append((nodes[place], second.nodes[other]))
        new.append((sums[place] + second.sums[other], num_items + len(children) - 1))
    del sums[untouched:], nodes[untouched:]
    new += zip(second.sums[:alone][::-1], second.nodes[:alone][::-1], strict=True)
    # Both branches keep sets of equal sum in this order.
    if len(new) <= FEW_SETS:
        for total, node in new:
            place = bisect_right(sums, -total, key=neg)
            sums.insert(place, total)
            nodes.insert(place, node)
        return first
    ranked = sorted([*zip(sums, nodes, strict=True), *new], key=itemgetter(0), reverse=True)
    return _Sets([total for total, _ in ranked], [node for _, node in ranked])


def _leaves(root: int, children: list[tuple[int, int]], num_items: int) -> list[int]:
    items, pending = [], [root]
    while pending:
        node = pending.pop()
        if node < num_items:
            items.append(node)
        else:
            pending.extend(children[node - num_items])
    return sorted(items)
