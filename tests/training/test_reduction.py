"""Metrics of all data ranks become one set, the same on every rank; what one rank lacks is merged and nobody hangs.

The arithmetic of merging is in ``core/test_metrics.py``.
"""

import math
from functools import partial

import pytest
import torch

from rlmodule.core.layout import Layout
from rlmodule.core.metrics import Metric, ReduceType, ratio, total
from rlmodule.training.reduction import CAPACITY, reduce_metrics
from strategies.parts.collectives import GroupCollectives, LocalCollectives
from tests.helpers.ranks import run_on_ranks


def parts_of(rank):
    """By hand over three ranks: shares 1 + 2 + 3, ratios (0 + 1 + 2) / (1 + 2 + 3), extrema of -0, -1, -2."""
    return {
        "loss": total(float(rank + 1)),
        "clip_frac": ratio(torch.tensor(float(rank)), float(rank + 1)),
        "low": Metric(-float(rank), 1.0, ReduceType.MIN),
        "high": Metric(-float(rank), 1.0, ReduceType.MAX),
    }


def reduced(rank, world_size, parts):
    collectives = GroupCollectives(torch.device("cpu"))
    merged = reduce_metrics(parts(rank), Layout(world_size, rank), collectives)
    return {name: metric.result for name, metric in merged.items()}


def test_one_rank_needs_no_exchange():
    merged = reduce_metrics(parts_of(1), Layout(), LocalCollectives())
    assert {name: m.result for name, m in merged.items()} == {"loss": 2, "clip_frac": 0.5, "low": -1, "high": -1}


@pytest.mark.ranks
def test_three_ranks_merge_by_how():
    ranks = run_on_ranks(3, partial(reduced, world_size=3, parts=parts_of))
    assert ranks[0] == {"loss": 6, "clip_frac": 0.5, "low": -2, "high": 0}
    assert ranks[1] == ranks[2] == ranks[0]


def lopsided(rank):
    return parts_of(rank) if rank == 0 else {"loss": total(1.0), "only_here": total(5.0)}


@pytest.mark.ranks
def test_a_key_that_one_rank_lacks_is_merged_over_those_that_have_it():
    first, second = run_on_ranks(2, partial(reduced, world_size=2, parts=lopsided))
    assert first == {"loss": 2, "clip_frac": 0, "low": 0, "high": 0, "only_here": 5}
    assert second == first


def nothing_on_the_first(rank):
    return {} if rank == 0 else {"loss": total(1.0)}


@pytest.mark.ranks
def test_a_rank_without_metrics_takes_part():
    assert run_on_ranks(2, partial(reduced, world_size=2, parts=nothing_on_the_first)) == [{"loss": 1}] * 2


def many(rank):
    return {f"m{i}": total(float(i)) for i in range(CAPACITY + 3)}


@pytest.mark.ranks
def test_more_metrics_than_a_block_holds_are_merged_too():
    first, second = run_on_ranks(2, partial(reduced, world_size=2, parts=many))
    assert first == second == {f"m{i}": 2.0 * i for i in range(CAPACITY + 3)}


def same_names_other_order(rank):
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return {name: total(float(ord(name))) for name in names}


@pytest.mark.ranks
def test_the_order_of_names_does_not_matter():
    assert run_on_ranks(2, partial(reduced, world_size=2, parts=same_names_other_order)) == [{"a": 194, "b": 196}] * 2


def nan_on_one(rank):
    return {"loss": total(math.nan if rank else 1.0), "fine": total(1.0)}


@pytest.mark.ranks
def test_nan_on_one_rank_is_nan_on_all_and_spoils_nothing_else():
    for rank in run_on_ranks(2, partial(reduced, world_size=2, parts=nan_on_one)):
        assert math.isnan(rank["loss"])
        assert rank["fine"] == 2
