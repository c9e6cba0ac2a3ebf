"""How far two runs are apart, in numbers that a tolerance can be set for.

A difference is relative to the largest value that the number takes in the reference run, or to ``FLOOR`` where that is
smaller: a mean that is zero but for rounding has no relative error. Leaves out the table (``report.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

# Log-probabilities of 5 to 12 nats are rounded to about 1e-6: what is made of them is exact to 1e-6 at best.
FLOOR = 0.1
LOSS, GRAD_NORM = "loss", "grad_norm"  # of each model that trains
FACTS_OF_THE_CUT = ("balance/", "global_seqlen/")  # they say how the work was cut, so they are meant to differ

Steps = Sequence[Mapping[str, float]]
Tensors = Iterable[tuple[str, Tensor]]


def metric_differences(steps: Steps, reference: Steps) -> dict[str, float]:
    """Largest difference of each metric over the steps; infinite where one run lacks it, or is alone in a NaN."""
    names = {name for step in (*steps, *reference) for name in step if not name.startswith(FACTS_OF_THE_CUT)}
    if len(steps) != len(reference):
        return dict.fromkeys(names, math.inf)
    return {name: _difference([s.get(name) for s in steps], [s.get(name) for s in reference]) for name in sorted(names)}


def largest_of(name: str, differences: Mapping[str, float]) -> float:
    """That of the metric ``name`` of the model that is furthest off."""
    return max(difference for metric, difference in differences.items() if metric.split("/")[-1] == name)


def _difference(values: Sequence[float | None], reference: Sequence[float | None]) -> float:
    if [v is None for v in values] != [v is None for v in reference]:
        return math.inf
    pairs = [(v, r) for v, r in zip(values, reference, strict=True) if v is not None and r is not None]
    if [math.isnan(v) for v, _ in pairs] != [math.isnan(r) for _, r in pairs]:
        return math.inf
    pairs = [(v, r) for v, r in pairs if not math.isnan(r)]
    scale = max([FLOOR, *(abs(r) for _, r in pairs if math.isfinite(r))])
    return max((0.0 if v == r else abs(v - r) / scale for v, r in pairs), default=0.0)


def parameter_difference(weights: Tensors, reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """(name, difference) of the tensor that is furthest off, relative to its largest entry; one tensor at a time."""
    seen: dict[str, float] = {}
    for name, tensor in weights:
        if name not in reference or reference[name].shape != tensor.shape:
            seen[name] = math.inf  # and on: other ranks take part in the stream to its end
            continue
        expected = reference[name].double()
        largest = float(expected.abs().max()) or 1.0
        difference = float((tensor.detach().cpu().double() - expected).abs().max()) / largest
        seen[name] = math.inf if math.isnan(difference) else difference
    missing = sorted(set(reference) - set(seen))
    if missing:
        return missing[0], math.inf
    worst = max(seen, key=lambda name: seen[name])
    return worst, seen[worst]
