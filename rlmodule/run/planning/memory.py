"""Bytes of one process: what it holds all the time, the peak of a training step, and the peak while it samples.

Formulas and what they leave out are in docs/planning.md; benchmarks/memory.py compares them with measured bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlmodule.batching.workload import ModelShape
from rlmodule.core.sharding import Sharding
from rlmodule.models.footprint import Footprint
from rlmodule.models.size import ModelSize
from rlmodule.ops.logprobs import default_chunk, default_softmax_rows

FP32, BF16 = 4, 2
GRANULE = 512  # a recommended budget is a multiple of it where it is larger


@dataclass(frozen=True)
class HeadShape:
    """The language-model head.

    Args:
        vocabulary, hidden: its matrix is [vocabulary, hidden].
        is_tied: whether it is the embedding.
        is_trained: whether it has gradients.
        compute_bytes: of one number in a matrix product.
        device: kind of device, which decides the size of a chunk of logits.
        entropy_trains: whether the loss depends on the entropy, whose derivative needs logits beside their softmax.
    """

    vocabulary: int
    hidden: int
    is_tied: bool
    is_trained: bool
    compute_bytes: int
    device: str
    entropy_trains: bool = False

    def chunk(self, num_tokens: int) -> int:
        """Bytes of the buffers of one chunk of logits: logits and softmax in fp32, products where they are narrower."""
        rows = min(num_tokens, default_chunk(self.vocabulary, self.device))
        softmax = default_softmax_rows(self.vocabulary, self.device, rows)
        # Where the softmax has taken the place of the logits, the first chunk makes them again in a second buffer.
        fp32_rows = rows + softmax + (rows if self.entropy_trains and softmax < rows else 0)
        narrow = self.compute_bytes if self.compute_bytes < FP32 else 0
        return self.vocabulary * (fp32_rows * FP32 + rows * narrow)

    def around(self, num_tokens: int) -> int:
        """Bytes of hidden states of the loss tokens with their gradients, and of the matrix as it is multiplied."""
        cast = self.vocabulary * self.hidden * self.compute_bytes if self.compute_bytes < FP32 else 0
        return num_tokens * self.hidden * 2 * FP32 + cast

    @property
    def gradient(self) -> int:
        """Bytes of its gradient while one is made; 0 where it does not train."""
        return self.vocabulary * self.hidden * FP32 if self.is_trained else 0


@dataclass(frozen=True)
class ModelMemory:
    """One model of a run on one process.

    Args:
        size: its parameters.
        sharding: how it is spread.
        is_trained: whether it has gradients and moments.
        state_bytes: of the optimizer for each trained parameter.
    """

    size: ModelSize
    sharding: Sharding
    is_trained: bool
    state_bytes: int

    def _numel(self, parameters: int, ranks: int) -> int:
        """Elements of this process's share; tensor-parallel ranks and stages split what is in the blocks alone.

        One stage is counted with all that is outside of blocks, of which the first and the last have a part each.
        """
        outside = min(self.size.outside, parameters) if parameters == self.size.total else 0
        whole = self.sharding.split // self.sharding.outside_split
        return (self._of_stage(parameters - outside) + whole * outside) // ranks

    def _of_stage(self, in_blocks: int) -> int:
        """What a stage with the most blocks has of so many parameters in all of them."""
        blocks = max(1, len(self.size.blocks))
        return in_blocks * math.ceil(blocks / self.sharding.stages) // blocks

    def _on_a_process(self, block: int) -> int:
        """Elements of a block once it is gathered: whole matrices or a tensor rank's part, and its share of experts."""
        size, s = self.size, self.sharding
        experts = size.experts[block] if s.experts > 1 else 0
        return (size.blocks[block] - experts) // s.split + experts // s.experts

    @property
    def _largest_block(self) -> int:
        return max((self._on_a_process(block) for block in range(len(self.size.blocks))), default=0)

    @property
    def weights(self) -> int:
        """Bytes of weights that the process holds, masters included."""
        s, trained = self.sharding, self.size.trained if self.is_trained else 0
        held = 0 if "weights" in s.on_host else self._numel(self.size.total, s.weights) * s.weight_bytes
        return held + (0 if s.masters is None else trained * FP32 // s.masters)

    @property
    def gradients(self) -> int:
        """Bytes of gradients once all are there."""
        s = self.sharding
        if "gradients" in s.on_host or not self.is_trained:
            return 0
        numel = self._numel(self.size.trained, s.gradients)
        if s.experts > 1 and s.gradients == s.split and self.size.trained == self.size.total:  # whole ones are kept
            experts = self._of_stage(sum(self.size.experts))
            numel += experts // s.experts - experts // s.split
        return numel * FP32 * s.gradient_copies

    @property
    def between_steps(self) -> int:
        """Bytes that the process holds while it does not train."""
        s = self.sharding
        return self.weights + self.moments + (self.gradients // s.gradient_copies if s.keeps_gradients else 0)

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's states on the device."""
        away = "moments" in self.sharding.on_host or not self.is_trained
        return 0 if away else self._numel(self.size.trained, self.sharding.moments) * self.state_bytes

    @property
    def gathered(self) -> int:
        """Bytes of whole weights besides: the block that runs, the next one, and what is outside of blocks."""
        s = self.sharding
        if not s.gathers_blocks or s.group == 1:
            return 0
        blocks, narrow = [self._on_a_process(block) for block in range(len(self.size.blocks))], 0
        every = self._of_stage(sum(blocks))
        if s.casts_matrices:
            narrow = self._of_stage(self.cast) if s.keeps_gathered else 2 * max(self.size.cast, default=0) // s.split
        gathered = (every if s.keeps_gathered else 2 * self._largest_block) + self.size.outside // s.split
        return gathered * s.gathered_bytes - narrow * (s.gathered_bytes - BF16)

    @property
    def cast(self) -> int:
        """Elements of matrices in blocks that are gathered in bfloat16, so that autocast makes no copy of them."""
        return sum(self.size.cast) // self.sharding.split if self.sharding.casts_matrices else 0

    @property
    def reducing(self) -> int:
        """Bytes of gradients on their way: those of a whole block, or a bucket."""
        s = self.sharding
        if not self.is_trained or s.group == 1 or s.gradients == s.split:
            return 0
        trained = self.size.trained // s.split
        return (min(self._largest_block, trained) + min(s.bucket_numel, trained)) * FP32


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes of one process in a training step, by what they are for.

    Args:
        weights, gradients, moments: of all models.
        gathered: whole weights of blocks, and gradients on their way to be reduced.
        activations: kept for the backward pass.
        head: logits chunk, hidden states around it, gradient of the head.
        backward: what the backward pass of a block holds on top, where that is more than the head.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    head: int
    backward: int

    @property
    def total(self) -> int:
        """The peak."""
        resident = self.weights + self.gradients + self.moments + self.gathered
        return resident + self.activations + max(self.head, self.backward)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of one process.

    Args:
        trained: the model whose step is the most expensive.
        others: the other models.
        footprint: activations of ``trained``.
        head: its language-model head.
        longest: tokens of the longest sample.
        loss_share: loss tokens of a token of the micro-batch, at most.
        gathered_keys: bytes of keys and values of other parts of the row, for each token of this process.
        micro_steps_accumulate: whether a step has several micro-batches, so that whole gradients are there already.
    """

    trained: ModelMemory
    others: tuple[ModelMemory, ...]
    footprint: Footprint
    head: HeadShape
    longest: int
    loss_share: float = 1.0
    gathered_keys: float = 0.0
    micro_steps_accumulate: bool = True

    def step(self, budget: int) -> StepMemory:
        """A training step with micro-batches of ``budget`` tokens on each device."""
        model, head, everything = self.trained, self.head, (self.trained, *self.others)
        longest, of_loss = min(self.longest, budget), math.ceil(budget * self.loss_share)
        of_head = head.gradient if head.is_tied else 0  # waits for that of the embedding
        return StepMemory(
            weights=sum(m.weights for m in everything),
            gradients=model.gradients if self.micro_steps_accumulate else 0,
            moments=sum(m.moments for m in everything),
            gathered=model.gathered + model.reducing,
            activations=int(self.footprint.kept(budget, longest) + budget * self.gathered_keys - self._not_copied),
            head=head.chunk(of_loss) + head.around(of_loss) + head.gradient,
            backward=int(max(0.0, self.footprint.backward(budget, longest))) + of_head,
        )

    @property
    def _not_copied(self) -> float:
        """Bytes of copies for products that autocast need not make and keep: of weights that are gathered as such."""
        return min(self.footprint.fixed, BF16 * self.trained.cast)

    @property
    def copied(self) -> float:
        """Bytes of copies of weights for products, which autocast keeps until the backward pass."""
        return self.footprint.fixed - self._not_copied

    def end_of_step(self) -> int:
        """Bytes when all gradients are there and activations are gone, with the embedding's on its way."""
        everything = (self.trained, *self.others)
        held = sum(m.weights + m.moments for m in everything) + self.trained.gradients
        return (
            held + self.trained.gathered + self.trained.reducing + self.head.gradient * (2 if self.head.is_tied else 1)
        )

    def peak(self, budget: int) -> int:
        """Peak bytes of a step."""
        return max(self.step(budget).total, self.end_of_step())

    def largest_budget(self, memory: float) -> int | None:
        """The most tokens of a micro-batch that fit into ``memory`` bytes; None where not even one sample does."""
        if self.peak(self.longest) > memory:
            return None
        most = _largest(self.longest, lambda budget: self.peak(budget) <= memory)
        return max(self.longest, most // GRANULE * GRANULE)

    def row_that_fits(self, room: float) -> int:
        """The most tokens of a row whose passes take ``room`` bytes beyond weights and moments; 1 where none fits."""

        def fits(num_tokens: int) -> bool:
            step = self.step(num_tokens)
            return step.total - step.weights - step.moments <= room

        return _largest(1, fits)


def _largest(low: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to which ``fits`` holds, ``low`` where it holds for none."""
    high = 2 * low
    while fits(high) and high < 2**25:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class SamplingMemory:
    """Peak bytes of one process while it samples in-process.

    Args:
        resident: weights and moments of all models, and gradients that are not let go.
        copied: the copy that a sharded model samples with, its matrices in the type of products.
        cache: keys and values.
        logits: of one step of decoding.
        rows: responses decoded side by side at most.
        laid_out: copies that CPUs make of weights for products with few rows, of a model whose blocks are plain.
    """

    resident: int
    copied: int
    cache: int
    logits: int
    rows: int
    laid_out: int = 0

    @classmethod
    def of(
        cls,
        models: Sequence[ModelMemory],
        shape: ModelShape,
        *,
        rows: int,
        length: int,
        vocabulary: int,
        itemsize: int,
        key_ranks: int,
        device: str,
    ) -> SamplingMemory:
        """Of a policy and the models beside it.

        Args:
            models: the policy first.
            shape: of the policy.
            rows: responses decoded side by side.
            length: tokens of each, prompt included.
            vocabulary: of the policy.
            itemsize: bytes of a number in a product.
            key_ranks: processes that the keys and values of a row are dealt out to.
            device: cpu, cuda, ...
        """
        size, sharding = models[0].size, models[0].sharding
        laid_out = 0.0
        if device == "cpu" and itemsize == FP32:  # blocks that several processes share are run as they are
            laid_out = shape.macs_per_loss_token + (shape.macs_per_token if sharding.split_to_sample == 1 else 0.0)
        return cls(
            resident=sum(model.between_steps for model in models),
            copied=_copied_to_sample(size, sharding, itemsize) if sharding.copies_to_sample else 0,
            cache=rows * length * shape.cached_per_token * itemsize // key_ranks,
            logits=rows * vocabulary * 2 * FP32,
            rows=rows,
            laid_out=round(laid_out * FP32),
        )

    @property
    def total(self) -> int:
        """The peak."""
        return self.resident + self.copied + self.laid_out + self.cache + self.logits


def _copied_to_sample(size: ModelSize, sharding: Sharding, itemsize: int) -> int:
    whole = size.total * FP32 - size.matrices * (FP32 - itemsize)
    experts = sum(size.experts) if sharding.experts == 1 else 0  # where training deals experts out, sampling has all
    shared = sum(size.cast) * itemsize + experts * FP32
    return whole - shared + math.ceil(shared / sharding.split_to_sample)
