"""Work of an iteration and of an optimizer step: tokens, micro-steps, FLOPs, traffic, time (docs/planning.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmodule.batching.workload import ModelShape
from rlmodule.core.layout import Layout, widths_of
from rlmodule.core.sharding import Sharding
from rlmodule.models.size import ModelSize

FP32 = 4  # bytes; gradients are reduced in it
FORWARD_SHARE = 1 / 3  # of the FLOPs of forward and backward: one of three matrix products


@dataclass(frozen=True)
class Lengths:
    """Expected tokens of a sample: of its prompt, and of its response."""

    prompt: float
    response: float

    @property
    def sample(self) -> float:
        """Both."""
        return self.prompt + self.response


@dataclass(frozen=True)
class StepWork:
    """One optimizer step over all processes.

    Args:
        samples: of a mini-batch.
        tokens: of its samples, prompts included.
        micro_steps: expected; every data rank runs as many micro-batches.
        flops: of the update, without what is recomputed.
        recomputed_flops: on top of that with activation checkpointing.
        bytes_per_micro_step, bytes_per_step: that a process sends for weights and gradients.
        bubble: time of the step over that of its work; above 1 where stages of a pipeline wait for each other.
    """

    samples: int
    tokens: float
    micro_steps: int
    flops: float
    recomputed_flops: float
    bytes_per_micro_step: float
    bytes_per_step: float
    bubble: float

    @property
    def traffic(self) -> float:
        """Bytes that a process sends in the step."""
        return self.micro_steps * self.bytes_per_micro_step + self.bytes_per_step


def micro_steps(samples: int, lengths: Lengths, budget: int, layout: Layout, fewest: int) -> int:
    """Micro-batches of a data rank if samples of the expected length fill the budget as far as whole ones do.

    ``fewest`` is how many there are at least, where there are samples for as many. A sample above the budget takes as
    many data ranks as its row is shared by.
    """
    fits = max(1, int(budget * layout.sp_size // lengths.sample))
    taken = next((w for w in widths_of(layout.max_sp_size) if lengths.sample <= w * budget), layout.max_sp_size)
    of_rank = math.ceil(samples * (taken if layout.max_sp_size > 1 else 1) / layout.dp_size)
    return max(math.ceil(of_rank / fits), min(fewest, of_rank))


def update_flops(shape: ModelShape, samples: float, lengths: Lengths) -> float:
    """FLOPs of forward and backward of ``samples`` samples of the expected lengths."""
    return samples * float(shape.flops([lengths.sample], [lengths.response])[0])


def sent_bytes(parameters: int, bytes_each: int, group: int, times: float) -> float:
    """Bytes that a process sends in ``times`` all-gathers or reduce-scatters over ``group`` processes (ring)."""
    return times * parameters * bytes_each * (group - 1) / group


def traffic(size: ModelSize, sharding: Sharding) -> tuple[float, float]:
    """(bytes per micro-step, bytes per step) that a process sends of one model's weights and gradients."""
    s, experts = sharding, sum(size.experts) if sharding.experts > 1 else 0
    is_whole = size.trained == size.total  # adapters leave experts, embedding and head as they are
    blocks = size.total - size.outside - experts
    same = s.group * s.split // s.experts  # processes that hold the same experts
    found = [
        _traffic(blocks, blocks if is_whole else size.trained, s.split * s.stages, s.group, s),
        _traffic(size.outside, size.outside if is_whole else 0, s.outside_split, s.group, s),
        _traffic(experts, experts if is_whole else 0, s.experts, same, s),
    ]
    return sum(per_micro_step for per_micro_step, _ in found), sum(per_step for _, per_step in found)


def _traffic(total: int, trained: int, split: int, group: int, s: Sharding) -> tuple[float, float]:
    """Of parameters whose ``split``-th part is exchanged within ``group`` processes."""
    total, trained = total // split, trained // split
    per_micro_step = sent_bytes(total, s.gathered_bytes, group, s.gathers_per_micro_step)
    per_micro_step += sent_bytes(trained, FP32, group, s.reduces_per_micro_step)
    per_step = sent_bytes(trained, s.weight_bytes, group, s.gathers_per_step)
    return per_micro_step, per_step + sent_bytes(trained, FP32, group, s.reduces_per_step)


def sampling_flops(shape: ModelShape, samples: float, prompts: float, lengths: Lengths) -> float:
    """FLOPs of prompts read once and responses drawn token by token, of which every token passes the head."""
    whole = samples * float(shape.flops([lengths.sample], [lengths.response])[0])
    repeated = (samples - prompts) * float(shape.flops([lengths.prompt], [0.0])[0])
    return FORWARD_SHARE * (whole - repeated)


def seconds(flops: float, processes: int, tflops: float, mfu: float) -> float:
    """Time of ``flops`` on ``processes`` devices of ``tflops`` TFLOP/s, of which the share ``mfu`` is used."""
    return flops / (processes * tflops * 1e12 * mfu)
