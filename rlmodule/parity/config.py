"""What a comparison of layouts covers, and how closely it looks. Leaves out the layouts (``layouts.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmodule.core.config import at_least, more_than


@dataclass(frozen=True)
class ParityConfig:
    """What is compared: layouts, steps, samples and tolerances."""

    layouts: list[str] = field(default_factory=list)  # names of layouts to compare; empty for all
    steps: int = 5  # optimizer steps
    samples_per_step: int = 16  # samples of one step; the last step has a single one
    max_length: int = 64  # tokens of the longest sample; a micro-batch holds twice as many
    tolerance: float = 1e-5  # largest relative difference of loss, gradient norm and every metric
    parameter_tolerance: float = 1e-4  # largest relative difference of every weight after the last step
    timeout: float = 600.0  # seconds one layout may take before it counts as hanging

    def __post_init__(self) -> None:
        at_least("steps", self.steps, 2)
        at_least("samples_per_step", self.samples_per_step, 2)
        at_least("max_length", self.max_length, 4)
        more_than("timeout", self.timeout, 0)
