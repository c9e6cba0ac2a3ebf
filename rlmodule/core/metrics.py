"""A logged number knows how it is merged: (value, weight, how). Never by its name, never a mean of means.

Leaves out collectives and files: this is the arithmetic of merging over micro-batches, then over data ranks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class ReduceType(enum.IntEnum):
    """How two parts of one metric become one."""

    SUM = 0  # parts were already divided by totals of the whole mini-batch: add
    MEAN = 1  # sum of values over sum of weights
    MIN = 2
    MAX = 3


@dataclass(frozen=True)
class Metric:
    """One part of a metric.

    Args:
        value: numerator for MEAN, the share for SUM, the extremum for MIN and MAX; float or scalar tensor.
        weight: denominator for MEAN; for the others any positive number when the part saw data, 0 when it saw none.
        reduce: how parts merge.
    """

    value: float | Tensor
    weight: float | Tensor = 1.0
    reduce: ReduceType = ReduceType.MEAN

    @property
    def result(self) -> float:
        """The number to log; NaN when nothing was seen (a SUM of nothing is 0)."""
        value, weight = float(self.value), float(self.weight)
        if self.reduce is ReduceType.SUM:
            return value
        if weight == 0:
            return math.nan
        return value / weight if self.reduce is ReduceType.MEAN else value

    @property
    def saw_data(self) -> bool:
        """Whether any part did; a SUM always does, as a share of 0 is a number."""
        return self.reduce is ReduceType.SUM or float(self.weight) != 0


Metrics = Mapping[str, Metric]


def total(value: float | Tensor) -> Metric:
    """A share that adds up to the logged number, e.g. a loss term divided by the totals of the step."""
    return Metric(_detached(value), 1.0, ReduceType.SUM)


def ratio(numerator: float | Tensor, denominator: float | Tensor) -> Metric:
    """Sum of numerators over sum of denominators, e.g. clipped tokens over loss tokens."""
    return Metric(_detached(numerator), _detached(denominator), ReduceType.MEAN)


def _detached(number: float | Tensor) -> float | Tensor:
    """A metric outlives its micro-batch; the graph behind it must not."""
    return number.detach() if isinstance(number, Tensor) else number


def mean_of(values: Tensor) -> Metric:
    """Mean over the entries of ``values`` in every part together; empty tensors count nowhere."""
    return Metric(values.detach().double().sum(), float(values.numel()), ReduceType.MEAN)


def minimum_of(values: Tensor) -> Metric:
    """Smallest entry over every part; empty parts are ignored."""
    seen = values.numel()
    return Metric(values.detach().double().min() if seen else math.inf, float(seen > 0), ReduceType.MIN)


def maximum_of(values: Tensor) -> Metric:
    """Largest entry over every part; empty parts are ignored."""
    seen = values.numel()
    return Metric(values.detach().double().max() if seen else -math.inf, float(seen > 0), ReduceType.MAX)


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches or ranks; a key that parts lack is merged over those that have it.

    Raises:
        ValueError: one key is merged in two ways.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is not None and known.reduce is not metric.reduce:
                raise ValueError(f"metric {name} is merged as {known.reduce.name} and as {metric.reduce.name}")
            merged[name] = metric if known is None else _merge_two(known, metric)
    return merged


def _merge_two(a: Metric, b: Metric) -> Metric:
    if a.reduce in (ReduceType.SUM, ReduceType.MEAN):
        return Metric(a.value + b.value, a.weight + b.weight, a.reduce)
    pick = torch.minimum if a.reduce is ReduceType.MIN else torch.maximum
    return Metric(pick(_seen_or_neutral(a), _seen_or_neutral(b)), a.weight + b.weight, a.reduce)


def _seen_or_neutral(metric: Metric) -> Tensor:
    """An extremum without data never wins, whatever number it carries; float64, so that it is one of the parts."""
    neutral = math.inf if metric.reduce is ReduceType.MIN else -math.inf
    value = torch.as_tensor(metric.value, dtype=torch.float64)
    return torch.where(torch.as_tensor(metric.weight > 0, device=value.device), value, neutral)


def to_rows(metrics: Metrics) -> tuple[list[str], Tensor]:
    """Names in sorted order and their [K, 3] float64 rows (value, weight, how); one host copy for all of them."""
    names = sorted(metrics)
    cells = [cell for name in names for cell in (metrics[name].value, metrics[name].weight, int(metrics[name].reduce))]
    tensors = [cell.detach() for cell in cells if isinstance(cell, Tensor)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
    on_host = iter(torch.stack([x.to(device, torch.float64) for x in tensors]).tolist() if tensors else [])
    numbers = [next(on_host) if isinstance(cell, Tensor) else float(cell) for cell in cells]
    return names, torch.tensor(numbers, dtype=torch.float64).reshape(-1, 3)


def from_rows(names: Iterable[str], rows: Tensor) -> dict[str, Metric]:
    """Inverse of ``to_rows``."""
    numbers = zip(names, rows.tolist(), strict=True)
    return {name: Metric(value, weight, ReduceType(int(reduce))) for name, (value, weight, reduce) in numbers}
