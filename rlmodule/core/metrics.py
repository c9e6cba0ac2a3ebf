"""Metrics as (value, weight, reduce type), and how they are merged over micro-batches and data ranks.

The reduce type is part of the metric and never guessed from its name; means are merged by numerator and denominator.
Collectives and files are elsewhere.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

MANTISSA_BITS, SMALLEST = 53, 5e-324  # of a float64
SUMMED_BITS = 16  # ``exact_sum`` adds up two to this many numbers at a time

CI_LOW, CI_HIGH = "/ci95_low", "/ci95_high"  # what the ends of a metric's 95 % interval are called beside it


class ReduceType(enum.IntEnum):
    """How two parts of a metric are merged."""

    SUM = 0  # sum of values, which were already divided by totals of the whole mini-batch
    MEAN = 1  # sum of values over sum of weights
    MIN = 2
    MAX = 3


@dataclass(frozen=True)
class Metric:
    """One part of a metric.

    Args:
        value: numerator for MEAN, term for SUM, extremum for MIN and MAX; float or scalar tensor.
        weight: denominator for MEAN; otherwise any positive number, or 0 if the part had no data.
        reduce: how parts are merged.
    """

    value: float | Tensor
    weight: float | Tensor = 1.0
    reduce: ReduceType = ReduceType.MEAN

    @property
    def result(self) -> float:
        """The number to log; NaN without data (0 for SUM)."""
        value, weight = float(self.value), float(self.weight)
        if self.reduce is ReduceType.SUM:
            return value
        if weight == 0:
            return math.nan
        return value / weight if self.reduce is ReduceType.MEAN else value

    @property
    def saw_data(self) -> bool:
        """Whether any part had data; always true for SUM, because an empty sum is 0."""
        return self.reduce is ReduceType.SUM or float(self.weight) != 0


Metrics = Mapping[str, Metric]


def total(value: float | Tensor) -> Metric:
    """A term of a sum, e.g. a loss divided by the totals of the step."""
    return Metric(_detached(value), 1.0, ReduceType.SUM)


def ratio(numerator: float | Tensor, denominator: float | Tensor) -> Metric:
    """Sum of numerators over sum of denominators, e.g. clipped tokens over loss tokens."""
    return Metric(_detached(numerator), _detached(denominator), ReduceType.MEAN)


def _detached(number: float | Tensor) -> float | Tensor:
    """Detach, because a metric outlives its micro-batch and must not keep its graph alive."""
    return number.detach() if isinstance(number, Tensor) else number


def mean_of(values: Tensor) -> Metric:
    """Mean over the entries of ``values`` of all parts."""
    return Metric(values.detach().double().sum(), float(values.numel()), ReduceType.MEAN)


def minimum_of(values: Tensor) -> Metric:
    """Smallest entry of all parts; empty parts are ignored."""
    count = values.numel()
    return Metric(values.detach().double().min() if count else math.inf, float(count > 0), ReduceType.MIN)


def maximum_of(values: Tensor) -> Metric:
    """Largest entry of all parts; empty parts are ignored."""
    count = values.numel()
    return Metric(values.detach().double().max() if count else -math.inf, float(count > 0), ReduceType.MAX)


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge the metrics of several micro-batches or ranks; a key is merged over the parts that have it.

    Raises:
        ValueError: a key has different reduce types.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is not None and known.reduce is not metric.reduce:
                raise ValueError(f"metric {name} is merged as {known.reduce.name} and as {metric.reduce.name}")
            merged[name] = metric if known is None else _merge_two(known, metric)
    return merged


def merge_rows(names: Sequence[str], rows: Tensor) -> dict[str, Metric]:
    """``merge`` of the metrics of R ranks that have the same names, all at once; the same numbers to the bit.

    Args:
        names: of K metrics.
        rows: [R, K, 3] float64 as ``to_rows`` gives them.

    Raises:
        ValueError: a key has different reduce types.
    """
    numbers = rows.numpy()
    value, weight, kind = (numbers[:, :, column] for column in range(3))  # [R, K]
    differs = (kind != kind[0]).any(axis=0)
    if differs.any():
        odd = int(differs.argmax())
        first, other = [ReduceType(int(k)).name for k in dict.fromkeys(kind[:, odd].tolist())][:2]
        raise ValueError(f"metric {names[odd]} is merged as {first} and as {other}")
    if len(numbers) == 1:
        return from_rows(names, rows[0])
    is_least, saw = kind[0] == ReduceType.MIN, weight > 0
    # One rank after the other, in order, so that sums round as those of ``merge``.
    sums, weights = np.add.accumulate(value)[-1], np.add.accumulate(weight)[-1]
    least, most = np.where(saw, value, np.inf).min(axis=0), np.where(saw, value, -np.inf).max(axis=0)
    merged = np.where(is_least, least, np.where(kind[0] == ReduceType.MAX, most, sums))
    return from_rows(names, torch.from_numpy(np.stack([merged, weights, kind[0]], axis=1)))


def _merge_two(a: Metric, b: Metric) -> Metric:
    if a.reduce in (ReduceType.SUM, ReduceType.MEAN):
        return Metric(a.value + b.value, a.weight + b.weight, a.reduce)
    pick = torch.minimum if a.reduce is ReduceType.MIN else torch.maximum
    return Metric(pick(_value_or_neutral(a), _value_or_neutral(b)), a.weight + b.weight, a.reduce)


def _value_or_neutral(metric: Metric) -> Tensor:
    """The value as float64, or the neutral element if the part had no data."""
    neutral = math.inf if metric.reduce is ReduceType.MIN else -math.inf
    value = torch.as_tensor(metric.value, dtype=torch.float64)
    return torch.where(torch.as_tensor(metric.weight > 0, device=value.device), value, neutral)


def to_rows(metrics: Metrics) -> tuple[list[str], Tensor]:
    """Sorted names and [K, 3] float64 rows (value, weight, reduce type); a single copy from the device."""
    names = sorted(metrics)
    cells = [cell for name in names for cell in (metrics[name].value, metrics[name].weight, int(metrics[name].reduce))]
    tensors = [cell.detach() for cell in cells if isinstance(cell, Tensor)]
    device = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
    from_device = iter(torch.stack([x.to(device, torch.float64) for x in tensors]).tolist() if tensors else [])
    row_major = [next(from_device) if isinstance(cell, Tensor) else float(cell) for cell in cells]
    return names, torch.tensor(row_major, dtype=torch.float64).reshape(-1, 3)


def from_rows(names: Iterable[str], rows: Tensor) -> dict[str, Metric]:
    """Inverse of ``to_rows``."""
    named_rows = zip(names, rows.tolist(), strict=True)
    return {name: Metric(value, weight, ReduceType(int(reduce))) for name, (value, weight, reduce) in named_rows}


def mean(values: Sequence[float]) -> float:
    """Mean, summed exactly; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def exact_sum(values: Floats) -> float:
    """Sum of [n] float64 as ``math.fsum`` gives it, without an object for each number.

    Numbers are cut into heads of so few bits that any sum of them is exact, and rests of which the same is done.
    """
    if not np.isfinite(values).all():
        return math.fsum(values.tolist())
    sums = []
    for start in range(0, len(values), 1 << SUMMED_BITS):
        rest = values[start : start + (1 << SUMMED_BITS)]
        while largest := float(np.abs(rest).max()):
            grid = max(math.ldexp(1.0, math.frexp(largest)[1] - MANTISSA_BITS + SUMMED_BITS), SMALLEST)
            head = np.rint(rest / grid) * grid
            sums.append(float(head.sum()))
            rest = rest - head
    return math.fsum(sums)


def array_mean(values: NDArray[Any]) -> float:
    """``mean`` of [n] numbers or flags."""
    return exact_sum(values.astype(np.float64, copy=False)) / len(values) if len(values) else math.nan


def array_std(values: Floats) -> float:
    """Population standard deviation of [n] (divides by the count); NaN of nothing."""
    if not len(values):
        return math.nan
    values = values - values[0]  # equal numbers have a deviation of exactly 0
    return math.sqrt(array_mean((values - array_mean(values)) ** 2))
