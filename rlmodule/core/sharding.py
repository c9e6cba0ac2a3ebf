"""What a strategy says of the memory and traffic of one model, before any process is started; for planning alone.

Leaves out bytes, which need the model's size (``run/planning/``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """How one model that trains is spread over the processes.

    Args:
        weights, gradients, moments: processes that each is divided over; 1 where every process holds all of it.
        masters: processes that a second fp32 copy of the weights is divided over; None where there is none.
        weight_bytes: of one weight as it is held.
        gathered_bytes: of one weight as it is gathered for a block.
        gathers_blocks: whether a process has whole weights of a block only while it runs.
        keeps_gathered: whether gathered blocks stay whole until their backward pass.
        keeps_outside, keeps_last_block: whether what is outside of blocks does, and the last block, in any case.
        casts_matrices: whether matrices that autocast casts to bfloat16 at each product are gathered in it.
        gradient_copies: times that a process holds its share of the gradients.
        keeps_gradients: whether it keeps room for one of them from step to step.
        bucket_numel: elements of a reduction buffer.
        on_host: what waits in host memory while the others work: weights, gradients, moments.
        copies_to_sample: whether sampling needs a copy of the model on every process.
        split_to_sample: processes that share every matrix of that copy's blocks, and its keys and values.
        group: processes that exchange weights and gradients.
        split: processes that share every matrix (tensor parallelism), whose own exchange is of activations.
        cuts_vocabulary: whether they share the embedding and the head as well, and not the matrices of blocks alone.
        stages: of a pipeline; each has its share of the blocks, and the first and the last what is around them.
        experts: processes that share the experts of a layer; a block is gathered with its share of them.
        gathers_per_micro_step: times that all weights are gathered in a micro-step; at most once what stays whole.
        reduces_per_micro_step: times that all gradients are reduced (scattered) in a micro-step.
        gathers_per_step, reduces_per_step: the same, once in an optimizer step.
    """

    weights: int = 1
    gradients: int = 1
    moments: int = 1
    masters: int | None = None
    weight_bytes: int = 4
    gathered_bytes: int = 4
    gathers_blocks: bool = False
    keeps_gathered: bool = False
    keeps_outside: bool = False
    keeps_last_block: bool = False
    casts_matrices: bool = False
    gradient_copies: int = 1
    keeps_gradients: bool = False
    bucket_numel: int = 0
    on_host: frozenset[str] = frozenset()
    copies_to_sample: bool = False
    split_to_sample: int = 1
    group: int = 1
    split: int = 1
    cuts_vocabulary: bool = False
    stages: int = 1
    experts: int = 1
    gathers_per_micro_step: int = 0
    reduces_per_micro_step: int = 0
    gathers_per_step: int = 0
    reduces_per_step: int = 0

    @property
    def outside_split(self) -> int:
        """Processes that share each tensor outside of the blocks."""
        return self.split if self.cuts_vocabulary else 1


SMALL = 1 / 16  # share of a block up to which what is beside its matrices is gathered with what is outside of blocks


def waiting_on_host(*, weights: bool, gradients: bool, moments: bool) -> frozenset[str]:
    """The words of ``Sharding.on_host``."""
    words = {"weights": weights, "gradients": gradients, "moments": moments}
    return frozenset(word for word, waits in words.items() if waits)
