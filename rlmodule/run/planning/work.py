"""Work of an iteration and of an optimizer step: tokens, micro-steps, FLOPs, traffic, time (docs/planning.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlmodule.batching.workload import ModelShape
from rlmodule.core.layout import Layout, widths_of
from rlmodule.core.sharding import SMALL, Sharding
from rlmodule.models.size import ModelSize

FP32, BF16 = 4, 2  # bytes; gradients are reduced in fp32
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


def sent_bytes(parameters: float, bytes_each: int, group: int, times: float) -> float:
    """Bytes that a process sends in ``times`` all-gathers or reduce-scatters over ``group`` processes (ring)."""
    return times * parameters * bytes_each * (group - 1) / group


@dataclass(frozen=True)
class Exchanged:
    """Parameters that travel alike.

    Args:
        numel: of whole tensors, or of a tensor rank's part of them, on one stage.
        trained: those that train.
        kept: those that stay whole until their backward pass, where others are gathered again.
        gathered_bytes: of one as it is gathered.
        group: processes that exchange them.
    """

    numel: float
    trained: float
    kept: float
    gathered_bytes: int
    group: int

    def traffic(self, s: Sharding) -> tuple[float, float]:
        """(bytes per micro-step, bytes per step) that a process sends."""
        again = max(0, s.gathers_per_micro_step - 1)
        gathers = s.gathers_per_micro_step * self.numel - again * self.kept
        at_once = self.numel if s.gathers_blocks else self.trained  # else it is what the optimizer has changed
        return (
            sent_bytes(gathers, self.gathered_bytes, self.group, 1)
            + sent_bytes(self.trained, FP32, self.group, s.reduces_per_micro_step),
            sent_bytes(at_once, self.gathered_bytes, self.group, s.gathers_per_step)
            + sent_bytes(self.trained, FP32, self.group, s.reduces_per_step),
        )


def traffic(size: ModelSize, sharding: Sharding) -> tuple[float, float]:
    """(bytes per micro-step, bytes per step) that a process sends of one model's weights and gradients."""
    found = [part.traffic(sharding) for part in exchanged(size, sharding)]
    return sum(per_micro_step for per_micro_step, _ in found), sum(per_step for _, per_step in found)


def exchanged(size: ModelSize, s: Sharding) -> list[Exchanged]:
    """The parameters of a model: matrices of blocks, what blocks have besides, what is outside of them, experts."""
    is_whole = size.trained == size.total  # adapters leave experts, embedding and head as they are
    experts = size.experts if s.experts > 1 else (0,) * len(size.blocks)
    cast = size.cast if s.casts_matrices else (0,) * len(size.blocks)
    rest = [block - own - matrices for block, own, matrices in zip(size.blocks, experts, cast, strict=True)]
    outside, split = size.outside / s.outside_split, s.split * s.stages
    if s.casts_matrices and sum(rest) <= SMALL * sum(size.blocks):
        outside, rest = outside + sum(rest) / split, [0] * len(rest)

    def of_blocks(numels: Sequence[int], split: int, trained: float, gathered_bytes: int, group: int) -> Exchanged:
        # A stage has its share of the blocks, and each has a last one.
        last = numels[-1] * s.stages if numels and s.keeps_last_block else 0
        return Exchanged(sum(numels) / split, trained / split, last / split, gathered_bytes, group)

    same = s.group * s.split // s.experts  # processes that hold the same experts
    return [
        of_blocks(cast, split, sum(cast) if is_whole else 0, BF16, s.group),
        of_blocks(rest, split, sum(rest) if is_whole else size.trained, s.gathered_bytes, s.group),
        Exchanged(outside, outside if is_whole else 0, outside * s.keeps_outside, s.gathered_bytes, s.group),
        of_blocks(experts, s.experts * s.stages, sum(experts) if is_whole else 0, s.gathered_bytes, same),
    ]


def sampling_flops(shape: ModelShape, samples: float, prompts: float, lengths: Lengths) -> float:
    """FLOPs of prompts read once and responses drawn token by token, of which every token passes the head."""
    whole = samples * float(shape.flops([lengths.sample], [lengths.response])[0])
    repeated = (samples - prompts) * float(shape.flops([lengths.prompt], [0.0])[0])
    return FORWARD_SHARE * (whole - repeated)


def seconds(flops: float, processes: int, tflops: float, mfu: float) -> float:
    """Time of ``flops`` on ``processes`` devices of ``tflops`` TFLOP/s, of which the share ``mfu`` is used."""
    return flops / (processes * tflops * 1e12 * mfu)
